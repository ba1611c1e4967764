"""`Quarantine`: finds the request that kills workers, and lets its neighbours live.

When a worker dies, every sequence in a plan in flight is a suspect. Suspects are tried in groups: a *trial* runs one
group and nothing else. It is over when each member got past the last position it had been handed out when the worker
died, or has ended. Another death in a trial halves the group. A member that was in flight alone gets a strike, the
second strike in a row condemns it. Passing clears the strikes, so that two unrelated deaths in the life of a long
stream do no harm.

It says who may run; the planner sees to it, and begins a trial only when nothing is in flight.
"""

from collections import deque

from services.scheduler.core.sequence import Sequence

STRIKES = 2


class Quarantine:
    """Groups of suspects still to be tried, and the trial that is on."""

    def __init__(self) -> None:
        self._groups: deque[list[Sequence]] = deque()
        self._trial: list[Sequence] = []
        self._awaited: list[Sequence] = []  # those of the trial that have not passed

    @property
    def active(self) -> bool:
        """Whether there are suspects at all."""
        return bool(self._awaited or self._groups)

    @property
    def due(self) -> bool:
        """Whether the next trial should begin as soon as nothing is in flight."""
        return bool(self._groups) and not self._awaited

    @property
    def trial(self) -> list[Sequence]:
        """The only sequences that may run while `active`."""
        return self._trial

    def accuse(self, named: list[Sequence]) -> Sequence | None:
        """A worker died with plans in flight that name these. Returns the one that is condemned, if any."""
        suspects = [sequence for sequence in named if sequence.finish_reason is None]
        untried = [sequence for sequence in self._awaited if sequence not in suspects]
        if untried:
            self._groups.appendleft(untried)
        self._trial, self._awaited = [], []
        for sequence in suspects:
            sequence.proof = max(sequence.proof, sequence.planned)  # it may not have got there again yet
        if len(named) == 1 and suspects:
            suspects[0].strikes += 1
            if suspects[0].strikes >= STRIKES:
                return suspects[0]
        half = (len(suspects) + 1) // 2
        self._groups.extendleft(group for group in (suspects[half:], suspects[:half]) if group)
        return None

    def begin(self) -> list[Sequence]:
        """Start the next trial and return its members."""
        self._trial = self._groups.popleft()
        self._awaited = list(self._trial)
        self.settle()
        return self._trial

    def settle(self) -> None:
        """Look at who has passed or ended; call it after anything that moves sequences on."""
        still = [sequence for sequence in self._awaited if not _passed(sequence)]
        for sequence in self._awaited:
            if sequence not in still:
                sequence.strikes = 0
        self._awaited = still

    def __repr__(self) -> str:
        return f"<Quarantine trial={self._awaited!r} groups={len(self._groups)}>"


def _passed(sequence: Sequence) -> bool:
    return sequence.finish_reason is not None or sequence.computed >= sequence.proof

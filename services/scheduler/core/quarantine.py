"""`Quarantine`: finds the request that kills workers, and lets its neighbours live.

When a worker dies, every sequence in a plan in flight is a suspect. Suspects run again in groups: one group at a time,
and no other sequence. A member is cleared when it has finished, or has computed all positions that were scheduled when
the worker died. The next group runs when all members are cleared. If another worker dies meanwhile, the group is
halved. A member that was in flight alone when two workers in a row died is the culprit. Clearing a member resets its
count of deaths, so that two unrelated deaths in the life of a long stream do no harm.

This class says who may run. The planner enforces it, and the scheduler starts a group only when nothing is in flight.
"""

from collections import deque

from services.scheduler.core.sequence import Sequence

MAX_DEATHS_ALONE = 2
"""Consecutive workers that die while they run one sequence alone, before it is ended as the culprit."""


class Quarantine:
    """The group of suspects that runs now, and those that are still to run."""

    def __init__(self) -> None:
        self._groups: deque[list[Sequence]] = deque()  # still to run
        self._group: list[Sequence] = []
        self._uncleared: list[Sequence] = []  # members of the group

    @property
    def active(self) -> bool:
        """True while there are suspects."""
        return bool(self._uncleared or self._groups)

    @property
    def group_due(self) -> bool:
        """True if the next group should run as soon as nothing is in flight."""
        return bool(self._groups) and not self._uncleared

    @property
    def group(self) -> list[Sequence]:
        """The only sequences that may run while `active`."""
        return self._group

    def lose_worker(self, in_flight: list[Sequence], *, is_evidence: bool = True) -> Sequence | None:
        """Suspect the sequences in flight at a worker that died. Return the culprit, or None if it is not certain.

        Without `is_evidence` there is no culprit: they only run again in smaller groups.
        """
        suspects = [sequence for sequence in in_flight if sequence.finish_reason is None]
        not_run = [sequence for sequence in self._uncleared if sequence not in suspects]
        if not_run:
            self._groups.appendleft(not_run)
        self._group, self._uncleared = [], []
        for sequence in suspects:
            suspicion = sequence.suspicion
            # An earlier death counts too: a sequence that is computed again may not have got that far yet.
            suspicion.cleared_at = max(suspicion.cleared_at, sequence.progress.num_scheduled)
        if len(in_flight) == 1 and suspects and is_evidence:
            suspects[0].suspicion.deaths_alone += 1
            if suspects[0].suspicion.deaths_alone >= MAX_DEATHS_ALONE:
                return suspects[0]
        half = (len(suspects) + 1) // 2
        self._groups.extendleft(group for group in (suspects[half:], suspects[:half]) if group)
        return None

    def start_group(self) -> list[Sequence]:
        """Start the next group and return its members."""
        self._group = self._groups.popleft()
        self._uncleared = list(self._group)
        self.update()
        return self._group

    def update(self) -> None:
        """Clear the members of the group that got far enough. Call it after anything that moves sequences on."""
        uncleared = [sequence for sequence in self._uncleared if not _is_cleared(sequence)]
        for sequence in self._uncleared:
            if sequence not in uncleared:
                sequence.suspicion.deaths_alone = 0
        self._uncleared = uncleared

    def __repr__(self) -> str:
        return f"<Quarantine uncleared={self._uncleared!r} groups={len(self._groups)}>"


def _is_cleared(sequence: Sequence) -> bool:
    return sequence.finish_reason is not None or sequence.progress.num_computed >= sequence.suspicion.cleared_at

"""`Quarantine`: finds the request that kills workers, and lets its neighbours live.

When a worker dies, every sequence in a plan in flight is a suspect. Suspects run again in groups: one group at a time,
and no other sequence. A member is cleared when it has finished, or has computed all positions that were scheduled when
the worker died. The next group runs when all members are cleared. If another worker dies meanwhile, the group is
halved.

A worker that dies while it runs one sequence alone is evidence against it, until the sequence is cleared. What kills by
its content kills again at the same position, so the second of such deaths shows the culprit if positions were being
computed that were being computed at the first one too. If not, something else may have killed both workers, such as an
operator while a long prompt is computed again. Only after `MAX_DEATHS_ALONE` of them is the sequence ended anyway.

A sequence that was submitted again after its scheduler was lost may bring a suspicion. If a worker has died while it
ran alone, it runs alone here too, which finds the culprit soonest. It is only what a gateway says, so this may hold up
the others no more than half of the time: one such sequence is taken in at a time, and after it none for as long as it
took, and for `MIN_PAUSE`. Those that come meanwhile, and suspects that never ran alone, run like any others.

This class says who may run. The planner enforces it, and the scheduler starts a group only when nothing is in flight.
"""

from collections import deque

from msgspec.structs import replace

from services.scheduler.core.plan_builder import InFlightPlan
from services.scheduler.core.sequence import Sequence
from shared.protocol import Suspicion

MAX_DEATHS_ALONE = 4
"""Workers that die while they run one sequence alone, wherever it stands, before it is ended as the culprit."""

MAX_AHEAD = 16
"""Maximum number of positions behind its tokens that a sequence from another scheduler must compute to be cleared. A
gateway has all tokens that were committed before a suspicion, so one that tells the truth names fewer."""


MIN_PAUSE = 30.0
"""Seconds at least from when one sequence from another scheduler is cleared until the next one is taken in. A
quarantine preempts all others, so they must run for much longer than it takes to compute them again."""


class Quarantine:
    """The group of suspects that runs now, and those that are still to run."""

    def __init__(self) -> None:
        self._groups: deque[list[Sequence]] = deque()  # still to run
        self._group: list[Sequence] = []
        self._uncleared: list[Sequence] = []  # members of the group
        self._resubmitted: Sequence | None = None  # from another scheduler, until it is cleared
        self._resubmitted_at = 0.0
        self._pause_ends = 0.0  # when another one may be taken in

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

    def add_resubmitted(self, sequence: Sequence, suspicion: Suspicion, now: float) -> None:
        """Take in a new sequence that another scheduler suspected, to run alone, unless others must run first."""
        if not suspicion.deaths_alone or self._resubmitted is not None or now < self._pause_ends:
            return
        sequence.suspicion = Suspicion(
            min(suspicion.cleared_at, len(sequence.tokens) + MAX_AHEAD),
            min(suspicion.deaths_alone, MAX_DEATHS_ALONE - 1),
            suspicion.start,
            suspicion.end,
        )
        self._groups.append([sequence])
        self._resubmitted, self._resubmitted_at = sequence, now

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
            before, alone = sequence.suspicion, is_evidence and len(in_flight) == 1
            sequence.suspect(_with_another_death(sequence, alone=alone))
            if alone and _is_proven(before, sequence.suspicion):
                return sequence
        half = (len(suspects) + 1) // 2
        self._groups.extendleft(group for group in (suspects[half:], suspects[:half]) if group)
        return None

    def start_group(self, now: float) -> list[Sequence]:
        """Start the next group and return its members."""
        self._group = self._groups.popleft()
        self._uncleared = list(self._group)
        self.update(now)
        return self._group

    def note_computed(self, plan: InFlightPlan) -> None:
        """Clear the sequences that a plan whose result is back has moved far enough, even if they were preempted."""
        for row, sequence in zip(plan.rows, plan.sequences, strict=True):
            if row.start + row.count >= sequence.suspicion.cleared_at:
                sequence.suspect(Suspicion())

    def update(self, now: float) -> None:
        """Let go of the members of the group that are cleared or have finished. Call it after sequences have ended."""
        self._uncleared = [sequence for sequence in self._uncleared if _is_suspect(sequence)]
        if self._resubmitted is not None and not _is_suspect(self._resubmitted):
            self._resubmitted = None
            self._pause_ends = now + max(now - self._resubmitted_at, MIN_PAUSE)

    def __repr__(self) -> str:
        return f"<Quarantine uncleared={self._uncleared!r} groups={len(self._groups)}>"


def _is_suspect(sequence: Sequence) -> bool:
    return sequence.finish_reason is None and sequence.suspicion.cleared_at > 0


def _with_another_death(sequence: Sequence, *, alone: bool) -> Suspicion:
    """Return the suspicion against a sequence after the death of a worker that ran it, maybe `alone`."""
    before, progress = sequence.suspicion, sequence.progress
    # An earlier death counts too: a sequence that is computed again may not have got that far yet.
    cleared_at = max(before.cleared_at, progress.num_scheduled)
    if not alone:
        return replace(before, cleared_at=cleared_at)
    return Suspicion(cleared_at, before.deaths_alone + 1, progress.num_computed, progress.num_scheduled)


def _is_proven(before: Suspicion, now: Suspicion) -> bool:
    """Return whether the last death alone, by which the suspicion has changed, shows that the sequence kills workers.

    `start` and `end` are 0 before the first of such deaths, which no positions overlap.
    """
    same_place = now.start < before.end and before.start < now.end
    return same_place or now.deaths_alone >= MAX_DEATHS_ALONE

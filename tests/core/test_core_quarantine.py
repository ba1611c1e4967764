"""Tests which requests run again together after they were in a step that killed a worker, and which one is blamed."""

from array import array

import pytest

from services.scheduler.core.plan_builder import InFlightPlan
from services.scheduler.core.quarantine import MAX_AHEAD, MAX_DEATHS_ALONE, MIN_PAUSE, Quarantine
from services.scheduler.core.sequence import Request, Sequence
from shared.protocol import FinishReason, Row, Sampling, Suspicion


def _suspects(count: int) -> list[Sequence]:
    suspects = []
    for id in range(count):
        request = Request(id, 4, Sampling(max_tokens=9, seed=0), (0.0, 0.0, id), 0)
        sequence = request.start(0, array("i", [1, 2, 3, 4]))
        sequence.progress.num_scheduled = 4
        suspects.append(sequence)
    return suspects


def _compute(quarantine: Quarantine, sequence: Sequence, end: int) -> None:
    """Let the result of a plan come back that has computed the positions below `end`."""
    quarantine.note_computed(InFlightPlan(0, [Row(0, 0, end, 0)], [sequence], [], [], end, end))
    sequence.progress.num_computed = end
    quarantine.update(0.0)


def _clear(quarantine: Quarantine, *sequences: Sequence) -> None:
    for sequence in sequences:
        _compute(quarantine, sequence, sequence.suspicion.cleared_at)


def _die_alone(quarantine: Quarantine, suspect: Sequence, start: int, end: int) -> Sequence | None:
    """Run a sequence alone, and let the worker die while it computes the positions from `start` to `end` - 1."""
    if quarantine.group_due:
        assert quarantine.start_group(0.0) == [suspect]
    suspect.progress.num_computed, suspect.progress.num_scheduled = start, end
    return quarantine.lose_worker([suspect])


def test_suspects_run_in_halves_one_after_the_other() -> None:
    quarantine, suspects = Quarantine(), _suspects(5)
    assert quarantine.lose_worker(suspects) is None
    assert quarantine.start_group(0.0) == suspects[:3]
    assert not quarantine.group_due
    _clear(quarantine, *suspects[:2])
    assert not quarantine.group_due, "the third is not cleared"
    _clear(quarantine, suspects[2])
    assert quarantine.start_group(0.0) == suspects[3:]
    suspects[3].finish_reason = FinishReason.ABORT
    _clear(quarantine, suspects[4])
    assert not quarantine.active


def test_a_death_in_quarantine_halves_the_group_and_keeps_the_others_for_later() -> None:
    quarantine, suspects = Quarantine(), _suspects(8)
    quarantine.lose_worker(suspects)
    assert quarantine.start_group(0.0) == suspects[:4]
    assert quarantine.lose_worker(suspects[1:4]) is None  # the first one of the group had no row yet
    groups = []
    while quarantine.active:
        groups.append(quarantine.start_group(0.0))
        _clear(quarantine, *groups[-1])
    assert groups == [suspects[1:3], suspects[3:4], suspects[:1], suspects[4:]]


def test_two_deaths_alone_at_one_place_show_the_culprit() -> None:
    quarantine, (suspect,) = Quarantine(), _suspects(1)
    assert _die_alone(quarantine, suspect, 0, 4) is None
    assert suspect.suspicion == Suspicion(cleared_at=4, deaths_alone=1, start=0, end=4)
    assert _die_alone(quarantine, suspect, 3, 5) is suspect
    assert not quarantine.active


def test_progress_between_two_deaths_alone_forgets_the_first() -> None:
    quarantine, (suspect,) = Quarantine(), _suspects(1)
    for start in range(4, 40, 4):
        assert _die_alone(quarantine, suspect, start, start + 2) is None
        quarantine.start_group(0.0)
        _compute(quarantine, suspect, start + 1)
        assert quarantine.active, "the position at which the worker died is not computed yet"
        _compute(quarantine, suspect, start + 2)
        assert not quarantine.active
        assert suspect.suspicion == Suspicion()


def test_deaths_alone_at_different_places_are_no_proof_but_a_few_are_enough() -> None:
    """Such as those of workers that an operator kills while a long prompt is computed again."""
    quarantine, (suspect,) = Quarantine(), _suspects(1)
    assert _die_alone(quarantine, suspect, 100, 102) is None
    for deaths in range(2, MAX_DEATHS_ALONE):
        start = 10 * deaths
        assert _die_alone(quarantine, suspect, start, start + 10) is None
        assert suspect.suspicion == Suspicion(102, deaths, start, start + 10), "it must get past where it once stood"
    assert _die_alone(quarantine, suspect, 0, 10) is suspect


def test_a_death_elsewhere_hides_no_culprit() -> None:
    quarantine, (suspect,) = Quarantine(), _suspects(1)
    assert _die_alone(quarantine, suspect, 100, 102) is None
    assert _die_alone(quarantine, suspect, 10, 20) is None, "another reason"
    assert _die_alone(quarantine, suspect, 100, 102) is None
    assert _die_alone(quarantine, suspect, 100, 102) is suspect


def test_missing_memory_makes_no_culprit_but_smaller_groups() -> None:
    quarantine, suspects = Quarantine(), _suspects(2)
    for group in (suspects, suspects[:1], suspects[:1], suspects[:1]):
        assert quarantine.lose_worker(group, is_evidence=False) is None
        assert quarantine.start_group(0.0) == suspects[:1]
    assert suspects[0].suspicion.deaths_alone == 0


def test_who_ran_beside_an_aborted_one_was_not_alone() -> None:
    quarantine, (aborted, other) = Quarantine(), _suspects(2)
    aborted.finish_reason = FinishReason.ABORT
    for _ in range(5):
        assert quarantine.lose_worker([aborted, other]) is None
    assert other.suspicion.deaths_alone == 0


def test_an_idle_worker_that_dies_makes_nobody_a_suspect() -> None:
    quarantine, suspects = Quarantine(), _suspects(2)
    assert quarantine.lose_worker([]) is None
    assert not quarantine.active
    quarantine.lose_worker(suspects)
    quarantine.start_group(0.0)
    assert quarantine.lose_worker([]) is None
    assert quarantine.start_group(0.0) == suspects[:1], "a group that had not run is run again"


def test_a_suspect_must_get_past_where_it_once_stood() -> None:
    quarantine, (suspect, other) = Quarantine(), _suspects(2)
    suspect.progress.num_scheduled = 100
    quarantine.lose_worker([suspect, other])
    quarantine.start_group(0.0)
    suspect.progress.num_scheduled = 10  # it is computed again, and the worker dies of something else
    quarantine.lose_worker([suspect])
    quarantine.start_group(0.0)
    _compute(quarantine, suspect, 99)
    assert quarantine.active
    assert quarantine.group == [suspect]


def test_a_suspect_that_was_preempted_when_it_had_got_far_enough_is_cleared() -> None:
    quarantine, (suspect,) = Quarantine(), _suspects(1)
    quarantine.lose_worker([suspect])
    quarantine.start_group(0.0)
    quarantine.note_computed(InFlightPlan(0, [Row(0, 0, 4, 0)], [suspect], [], 4, 4))
    suspect.rewind()
    quarantine.update(0.0)
    assert not quarantine.active


def test_a_suspect_of_another_scheduler_runs_alone_with_its_deaths() -> None:
    quarantine, (first, second) = Quarantine(), _suspects(2)
    quarantine.lose_worker([second])
    quarantine.add_resubmitted(first, Suspicion(5, 1, 3, 5), 0.0)
    assert quarantine.start_group(0.0) == [second]
    _clear(quarantine, second)
    assert _die_alone(quarantine, first, 4, 6) is first


def test_a_suspect_of_another_scheduler_that_never_ran_alone_is_none_here() -> None:
    quarantine, (suspect,) = Quarantine(), _suspects(1)
    quarantine.add_resubmitted(suspect, Suspicion(5), 0.0)
    assert not quarantine.active
    assert suspect.suspicion == Suspicion()


@pytest.mark.parametrize("seconds", [1.0, 7 * MIN_PAUSE])
def test_suspects_of_other_schedulers_leave_others_half_of_the_time(seconds: float) -> None:
    """`seconds` is how long the first one takes."""
    quarantine, (first, *others) = Quarantine(), _suspects(4)
    claim, begin = Suspicion(5, 1, 3, 5), 100.0
    quarantine.add_resubmitted(first, claim, begin)
    quarantine.add_resubmitted(others[0], claim, begin)
    assert quarantine.start_group(begin) == [first]
    assert not quarantine.group_due, "one at a time"
    end = begin + seconds
    quarantine.note_computed(InFlightPlan(0, [Row(0, 0, 5, 0)], [first], [], 5, 5))
    quarantine.update(end)
    pause = max(seconds, MIN_PAUSE)
    quarantine.add_resubmitted(others[1], claim, end + 0.99 * pause)
    assert not quarantine.active
    quarantine.add_resubmitted(others[2], claim, end + pause)
    assert quarantine.start_group(end + pause) == [others[2]]
    assert [other.suspicion.deaths_alone for other in others] == [0, 0, 1]


def test_a_culprit_of_another_scheduler_makes_room_for_the_next() -> None:
    quarantine, (first, second) = Quarantine(), _suspects(2)
    quarantine.add_resubmitted(first, Suspicion(5, 1, 3, 5), 0.0)
    assert _die_alone(quarantine, first, 4, 6) is first
    first.finish_reason = FinishReason.ERROR
    quarantine.update(0.0)
    quarantine.add_resubmitted(second, Suspicion(5, 1, 3, 5), MIN_PAUSE)
    assert quarantine.start_group(MIN_PAUSE) == [second]


def test_the_claims_of_a_gateway_are_bounded() -> None:
    quarantine, (suspect,) = Quarantine(), _suspects(1)
    quarantine.add_resubmitted(suspect, Suspicion(2**31 - 1, 2**31 - 1, 0, 0), 0.0)
    assert suspect.suspicion == Suspicion(4 + MAX_AHEAD, MAX_DEATHS_ALONE - 1, 0, 0)
    quarantine.start_group(0.0)
    _compute(quarantine, suspect, 4 + MAX_AHEAD)
    assert not quarantine.active

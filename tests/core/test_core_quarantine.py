"""Tests which requests run again together after they were in a step that killed a worker, and which one is blamed."""

from array import array

from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.sequence import Request, Sequence
from shared.protocol import FinishReason, Sampling


def _suspects(count: int) -> list[Sequence]:
    suspects = []
    for id in range(count):
        request = Request(id, 4, Sampling(max_tokens=9, seed=0), (0.0, 0.0, id), 0)
        sequence = request.start(0, array("i", [1, 2, 3, 4]))
        sequence.progress.num_scheduled = 4
        suspects.append(sequence)
    return suspects


def _clear(*sequences: Sequence) -> None:
    for sequence in sequences:
        sequence.progress.num_computed = sequence.suspicion.cleared_at


def test_suspects_run_in_halves_one_after_the_other() -> None:
    quarantine, suspects = Quarantine(), _suspects(5)
    assert quarantine.lose_worker(suspects) is None
    assert quarantine.start_group() == suspects[:3]
    assert not quarantine.group_due
    _clear(*suspects[:2])
    quarantine.update()
    assert not quarantine.group_due, "the third is not cleared"
    _clear(suspects[2])
    quarantine.update()
    assert quarantine.start_group() == suspects[3:]
    suspects[3].finish_reason = FinishReason.ABORT
    _clear(suspects[4])
    quarantine.update()
    assert not quarantine.active


def test_a_death_in_quarantine_halves_the_group_and_keeps_the_others_for_later() -> None:
    quarantine, suspects = Quarantine(), _suspects(8)
    quarantine.lose_worker(suspects)
    assert quarantine.start_group() == suspects[:4]
    assert quarantine.lose_worker(suspects[1:4]) is None  # the first one of the group had no row yet
    groups = []
    while quarantine.active:
        groups.append(quarantine.start_group())
        _clear(*groups[-1])
        quarantine.update()
    assert groups == [suspects[1:3], suspects[3:4], suspects[:1], suspects[4:]]


def test_two_deaths_alone_in_a_row_show_the_culprit() -> None:
    quarantine, (suspect,) = Quarantine(), _suspects(1)
    assert quarantine.lose_worker([suspect]) is None
    quarantine.start_group()
    _clear(suspect)
    quarantine.update()
    assert quarantine.lose_worker([suspect]) is None
    suspect.progress.num_computed = 0
    quarantine.start_group()
    assert quarantine.lose_worker([suspect]) is suspect
    assert not quarantine.active


def test_missing_memory_makes_no_culprit_but_smaller_groups() -> None:
    quarantine, suspects = Quarantine(), _suspects(2)
    for group in (suspects, suspects[:1], suspects[:1], suspects[:1]):
        assert quarantine.lose_worker(group, is_evidence=False) is None
        assert quarantine.start_group() == suspects[:1]
    assert suspects[0].suspicion.deaths_alone == 0


def test_who_ran_beside_an_aborted_one_was_not_alone() -> None:
    quarantine, (aborted, other) = Quarantine(), _suspects(2)
    aborted.finish_reason = FinishReason.ABORT
    for _ in range(3):
        assert quarantine.lose_worker([aborted, other]) is None
    assert other.suspicion.deaths_alone == 0


def test_an_idle_worker_that_dies_makes_nobody_a_suspect() -> None:
    quarantine, suspects = Quarantine(), _suspects(2)
    assert quarantine.lose_worker([]) is None
    assert not quarantine.active
    quarantine.lose_worker(suspects)
    quarantine.start_group()
    assert quarantine.lose_worker([]) is None
    assert quarantine.start_group() == suspects[:1], "a group that had not run is run again"


def test_a_suspect_must_get_past_where_it_once_stood() -> None:
    quarantine, (suspect, other) = Quarantine(), _suspects(2)
    suspect.progress.num_scheduled = 100
    quarantine.lose_worker([suspect, other])
    quarantine.start_group()
    suspect.progress.num_scheduled = 10  # it is computed again, and the worker dies of something else
    quarantine.lose_worker([suspect])
    quarantine.start_group()
    suspect.progress.num_computed = 99
    quarantine.update()
    assert quarantine.active
    assert quarantine.group == [suspect]

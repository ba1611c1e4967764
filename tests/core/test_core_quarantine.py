"""Suspects of a worker's death: who is tried with whom, and who is condemned."""

from array import array

from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.sequence import Request, Sequence
from shared.protocol import FinishReason, Sampling


def _suspects(count: int) -> list[Sequence]:
    made = []
    for id in range(count):
        request = Request(id, 4, Sampling(max_tokens=9, seed=0), (0.0, 0.0, id), 0)
        sequence = request.spawn(0, array("i", [1, 2, 3, 4]))
        sequence.planned = 4
        made.append(sequence)
    return made


def _pass(*sequences: Sequence) -> None:
    for sequence in sequences:
        sequence.computed = sequence.proof


def test_suspects_run_in_halves_one_after_the_other() -> None:
    quarantine, suspects = Quarantine(), _suspects(5)
    assert quarantine.accuse(suspects) is None
    assert quarantine.begin() == suspects[:3]
    assert not quarantine.due
    _pass(*suspects[:2])
    quarantine.settle()
    assert not quarantine.due, "the third has not passed"
    _pass(suspects[2])
    quarantine.settle()
    assert quarantine.begin() == suspects[3:]
    suspects[3].finish_reason = FinishReason.ABORT
    _pass(suspects[4])
    quarantine.settle()
    assert not quarantine.active


def test_a_death_in_a_trial_halves_the_group_and_keeps_the_others_for_later() -> None:
    quarantine, suspects = Quarantine(), _suspects(8)
    quarantine.accuse(suspects)
    assert quarantine.begin() == suspects[:4]
    assert quarantine.accuse(suspects[1:4]) is None  # the first one of the group had no row yet
    groups = []
    while quarantine.active:
        groups.append(quarantine.begin())
        _pass(*groups[-1])
        quarantine.settle()
    assert groups == [suspects[1:3], suspects[3:4], suspects[:1], suspects[4:]]


def test_twice_alone_condemns_and_passing_in_between_acquits() -> None:
    quarantine, (suspect,) = Quarantine(), _suspects(1)
    assert quarantine.accuse([suspect]) is None
    quarantine.begin()
    _pass(suspect)
    quarantine.settle()
    assert quarantine.accuse([suspect]) is None
    suspect.computed = 0
    quarantine.begin()
    assert quarantine.accuse([suspect]) is suspect
    assert not quarantine.active


def test_who_ran_beside_an_aborted_one_was_not_alone() -> None:
    quarantine, (aborted, other) = Quarantine(), _suspects(2)
    aborted.finish_reason = FinishReason.ABORT
    for _ in range(3):
        assert quarantine.accuse([aborted, other]) is None
    assert other.strikes == 0


def test_an_idle_worker_that_dies_accuses_nobody() -> None:
    quarantine, suspects = Quarantine(), _suspects(2)
    assert quarantine.accuse([]) is None
    assert not quarantine.active
    quarantine.accuse(suspects)
    quarantine.begin()
    assert quarantine.accuse([]) is None
    assert quarantine.begin() == suspects[:1], "a trial that had not begun is tried again"


def test_a_suspect_must_get_past_where_it_once_stood() -> None:
    quarantine, (suspect, other) = Quarantine(), _suspects(2)
    suspect.planned = 100
    quarantine.accuse([suspect, other])
    quarantine.begin()
    suspect.planned = 10  # it is computed again, and the worker dies of something else
    quarantine.accuse([suspect])
    quarantine.begin()
    suspect.computed = 99
    quarantine.settle()
    assert quarantine.active
    assert quarantine.trial == [suspect]

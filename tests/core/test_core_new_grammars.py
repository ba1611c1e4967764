"""Tests how many grammars that the worker has to compile a plan admits."""

import pytest

from services.scheduler.core import Limits, Scheduler
from shared.protocol import Epoch, SampledRow, Sampling, StepResult, Submit, pack_tokens

EPOCH = Epoch("boot", 1)


@pytest.fixture
def core() -> Scheduler:
    limits = Limits(num_blocks=400, max_num_seqs=40, max_num_batched_tokens=400, max_model_len=32)
    core = Scheduler(limits)
    core.begin_epoch(EPOCH, limits.num_blocks)
    return core


def submit(core: Scheduler, *grammars: str, max_tokens: int = 9) -> None:
    """Submit a request for each of the grammars; "" is none."""
    for grammar in grammars:
        id = core._next_serial
        assert (
            core.submit(Submit(id, pack_tokens([id, 2, 3]), 3, Sampling(max_tokens, 0, grammar=grammar)), 1.0) is None
        )


def admitted(core: Scheduler) -> list[str]:
    """Return the first letters of the grammars that the next plan brings, and let the worker answer it."""
    plan = core.plan(1.0)
    assert plan is not None
    rows = [SampledRow(row.slot, [7] * row.samples) for row in plan.rows if row.samples]
    core.commit(StepResult(EPOCH, plan.step, rows, 0.0))
    return [new.sampling.grammar[:1] for new in plan.new_sequences]


def test_long_grammars_come_one_after_the_other(core: Scheduler) -> None:
    """Sequences behind one that waits are not admitted before it, even without a grammar."""
    submit(core, "a" * 10_000, "b" * 6384, "c" * 6385, "", "d" * 10_000)
    assert [admitted(core) for _ in range(3)] == [["a", "b"], ["c", ""], ["d"]]


def test_the_first_has_room_however_long_its_grammar_is(core: Scheduler) -> None:
    submit(core, "", "a" * 60_000, "b", "c" * 60_000)
    assert [admitted(core) for _ in range(3)] == [["", "a"], ["b"], ["c"]]


def test_short_ones_count_as_a_kilobyte(core: Scheduler) -> None:
    submit(core, *(chr(ord("A") + at) for at in range(20)))
    assert [len(admitted(core)) for _ in range(2)] == [16, 4]


def test_the_same_grammar_counts_once_and_not_while_it_is_followed(core: Scheduler) -> None:
    submit(core, *["a" * 16_000] * 3, "b" * 16_000, *["a" * 16_000] * 2)
    assert [admitted(core) for _ in range(2)] == [["a"] * 3, ["b", "a", "a"]]


def test_a_grammar_that_nobody_follows_any_more_counts_again(core: Scheduler) -> None:
    submit(core, "a" * 16_000, max_tokens=1)
    assert admitted(core) == ["a"]
    submit(core, "b" * 10_000, "a" * 16_000)
    assert [admitted(core) for _ in range(2)] == [["b"], ["a"]]

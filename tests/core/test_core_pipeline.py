"""Tests plans for workers in pipeline stages, by the messages that the core returns."""

import pytest

from services.scheduler.core import Limits, Scheduler
from shared.protocol import (
    Epoch,
    ProgressRow,
    Row,
    SampledRow,
    Sampling,
    StepPlan,
    StepResult,
    Submit,
    pack_tokens,
)

EPOCH = Epoch("boot", 1)


def core_of(num_stages: int, depth: int, max_num_batched_tokens: int = 64, **changes: float) -> Scheduler:
    limits = Limits(
        num_blocks=256,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=64,
        block_size=4,
        depth=depth,
        num_stages=num_stages,
        **changes,  # type: ignore[arg-type]
    )
    core = Scheduler(limits)
    core.begin_epoch(EPOCH, limits.num_blocks)
    return core


def submit(core: Scheduler, id: int, prompt: list[int], max_tokens: int = 20, n: int = 1) -> None:
    request = Submit(id, pack_tokens(prompt), len(prompt), Sampling(max_tokens, seed=id), n, arrival=float(id))
    assert core.submit(request, 1.0) is None


def plan(core: Scheduler) -> StepPlan:
    made = core.plan(1.0)
    assert made is not None
    return made


def commit(core: Scheduler, made: StepPlan, first: int = 100) -> list[ProgressRow]:
    """Commit a result in which the sampling slots get `first`, `first` + 1, ..."""
    slots = [row.slot for row in made.rows if row.samples]
    slots += [slot for fork in made.forks for slot, _ in fork.children]
    rows = [SampledRow(slot, [first + at]) for at, slot in enumerate(slots)]
    return core.commit(StepResult(made.epoch, made.step, rows))


def test_an_output_goes_on_when_its_token_is_there_and_the_plan_tells_it() -> None:
    core = core_of(2, 3)
    submit(core, 1, [1, 2, 3])
    first = plan(core)
    assert (first.rows, first.sampled) == ([Row(0, 0, 3, 1)], [])
    assert core.plan(1.0) is None, "the first stage could not compute it"
    commit(core, first, 50)
    second = plan(core)
    assert (second.rows, second.sampled) == ([Row(0, 3, 1, 1)], [(0, 50)])
    assert core.plan(1.0) is None
    commit(core, second, 51)
    assert plan(core).sampled == [(0, 51)]


def test_a_long_prompt_fills_the_pipeline() -> None:
    core = core_of(2, 3, max_num_batched_tokens=9)
    submit(core, 1, list(range(30)))
    plans = [plan(core) for _ in range(3)]
    assert [made.rows for made in plans] == [[Row(0, start, 9, 0)] for start in (0, 9, 18)]
    assert core.plan(1.0) is None


def test_without_stages_nothing_waits_and_nothing_is_told() -> None:
    core = core_of(1, 3)
    submit(core, 1, [1, 2, 3])
    plans = [plan(core) for _ in range(3)]
    assert [made.rows for made in plans] == [[Row(0, 0, 3, 1)], [Row(0, 3, 1, 1)], [Row(0, 4, 1, 1)]]
    commit(core, plans[0])
    assert plan(core).sampled == []


def test_forks_are_told_their_own_tokens() -> None:
    core = core_of(2, 3)
    submit(core, 1, [1, 2, 3], n=3)
    first = plan(core)
    (fork,) = first.forks
    commit(core, first, 50)
    plans = [plan(core), plan(core)]
    slots = [fork.parent, *(slot for slot, _ in fork.children)]
    assert sorted(plans[0].sampled + plans[1].sampled) == sorted(zip(slots, (50, 51, 52), strict=True))


def test_one_that_is_admitted_again_brings_its_tokens_along() -> None:
    core = core_of(2, 3)
    submit(core, 1, [1, 2, 3])
    commit(core, plan(core), 50)
    core.lose_worker(1.0)
    core.begin_epoch(Epoch("boot", 2), 256)
    made = plan(core)
    assert (made.new_sequences[0].tokens, made.sampled) == (pack_tokens([1, 2, 3, 50]), [])
    commit(core, made, 51)
    assert plan(core).sampled == [(0, 51)]


@pytest.mark.parametrize(("num_stages", "depth"), [(2, 3), (2, 2), (3, 4), (4, 5), (4, 4)])
@pytest.mark.parametrize("num_outputs", [1, 2, 3, 5, 8])
def test_outputs_are_spread_over_the_stages(num_stages: int, depth: int, num_outputs: int) -> None:
    """Each plan has at most a stage's share, all are under way at once, and nobody is passed for long."""
    core = core_of(num_stages, depth)
    for id in range(num_outputs):
        submit(core, id, [1, 2, id], max_tokens=60)
    commit(core, plan(core))
    share = -(-num_outputs // num_stages)
    in_flight: list[StepPlan] = []
    rows = dict.fromkeys(range(num_outputs), 0)
    for _ in range(5 * num_stages):
        while (made := core.plan(1.0)) is not None:
            in_flight.append(made)
            assert len(made.rows) <= share
            assert [slot for slot, _ in made.sampled] == [row.slot for row in made.rows]
        under_way = [row.slot for made in in_flight for row in made.rows]
        assert sorted(under_way) == list(range(num_outputs))
        done = in_flight.pop(0)
        for row in done.rows:
            rows[row.slot] += 1
        commit(core, done)
    assert max(rows.values()) - min(rows.values()) <= 1


def test_a_plan_between_those_of_streams_is_as_short_as_one_with_streams() -> None:
    """Its stage time is part of every stream's."""
    core = core_of(2, 3, max_step_seconds=1e-9)
    core._step_time.restart(0.01, 0.001)
    submit(core, 1, [1, 2, 3])
    commit(core, plan(core))
    assert plan(core).rows == [Row(0, 3, 1, 1)]
    submit(core, 2, list(range(60)), max_tokens=1)
    made = plan(core)
    assert made.rows == [Row(1, 0, 16, 0)]

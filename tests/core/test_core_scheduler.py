"""Tests the methods of the scheduler core by the messages that they return."""

from typing import Any

import pytest

from services.scheduler.core import Limits, Scheduler
from shared.errors import ConfigError, ProtocolError
from shared.protocol import (
    Epoch,
    FinishReason,
    Fork,
    NewSequence,
    ProgressRow,
    Row,
    SampledRow,
    Sampling,
    SchedulingInfo,
    StepPlan,
    StepResult,
    Submit,
    Suspicion,
    TableWrite,
    TokenLogprobs,
    pack_tokens,
)

EPOCH = Epoch("boot", 1)


def _core(**changes: object) -> Scheduler:
    sizes: dict[str, object] = {
        "num_blocks": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 32,
        "block_size": 4,
    }
    core = Scheduler(Limits(**{**sizes, **changes}))  # type: ignore[arg-type]
    core.begin_epoch(EPOCH, core.limits.num_blocks)
    return core


AT_ONCE = SchedulingInfo(0.0, 0)
"""The scheduling info that the first row of a sequence carries if it did not wait."""


def _submit(core: Scheduler, id: int, prompt: list[int], sampling: Sampling, **fields: Any) -> None:
    request = Submit(id, pack_tokens(prompt), fields.pop("prompt_len", len(prompt)), sampling, **fields)
    assert core.submit(request, 1.0) is None


def _plan(core: Scheduler) -> StepPlan:
    plan = core.plan(1.0)
    assert plan is not None
    return plan


def _commit(core: Scheduler, plan: StepPlan, *tokens: int, **fields: object) -> list[ProgressRow]:
    """Commit a result in which each sampling slot, children included, gets the next of the tokens."""
    slots = [row.slot for row in plan.rows if row.samples] + [slot for fork in plan.forks for slot, _ in fork.children]
    rows = [SampledRow(slot, [token]) for slot, token in zip(slots, tokens, strict=True)]
    return core.commit(StepResult(plan.epoch, plan.step, rows))


def test_the_way_of_a_request_at_depth_two() -> None:
    core = _core()
    sampling = Sampling(max_tokens=3, seed=5)
    _submit(core, 1, [1, 2, 3, 4, 5], sampling, request_id="cmpl-a")
    first = _plan(core)
    new = NewSequence(0, pack_tokens([1, 2, 3, 4, 5]), 5, [0, 1], sampling, 0, "cmpl-a")
    assert first == StepPlan(EPOCH, 0, [Row(0, 0, 5, 1)], new_sequences=[new])
    second = _plan(core)
    assert second == StepPlan(EPOCH, 1, [Row(0, 5, 1, 1)]), "before the first result is there"
    assert core.plan(1.0) is None
    assert core.in_flight == 2
    assert _commit(core, first, 6) == [ProgressRow(1, 0, 0, [6], scheduling=AT_ONCE)]
    third = _plan(core)
    assert third == StepPlan(EPOCH, 2, [Row(0, 6, 1, 1)])
    assert _commit(core, second, 7) == [ProgressRow(1, 0, 1, [7])]
    assert core.plan(1.0) is None, "the third token is on the way, and it is the last"
    assert _commit(core, third, 8) == [ProgressRow(1, 0, 2, [8], finish_reason=FinishReason.LENGTH)]
    assert core.idle
    _submit(core, 2, [9], sampling)
    assert _plan(core).released_slots == [0]


def test_a_new_block_is_written_when_a_sequence_grows_into_it() -> None:
    core = _core(depth=1)
    _submit(core, 1, [1, 2, 3, 4], Sampling(max_tokens=3, seed=5))
    _commit(core, _plan(core), 5)
    plan = _plan(core)
    assert (plan.rows, plan.table_writes) == ([Row(0, 4, 1, 1)], [TableWrite(0, 1, [1])])


def test_a_full_hit_copies_its_last_block_and_computes_one_token() -> None:
    core = _core(depth=1)
    sampling = Sampling(max_tokens=1, seed=5)
    _submit(core, 1, [1, 2, 3, 4, 5, 6, 7, 8], sampling)
    _commit(core, _plan(core), 9)
    _submit(core, 2, [1, 2, 3, 4, 5, 6, 7, 8], sampling)
    plan = _plan(core)
    assert plan.rows == [Row(plan.new_sequences[0].slot, 7, 1, 1)]
    assert plan.new_sequences[0].blocks[0] == 0
    assert plan.block_copies == [(1, plan.new_sequences[0].blocks[1])]
    assert core.snapshot().blocks_free == 16 - 3, "the source is pinned"
    (row,) = _commit(core, plan, 9)
    assert row.cached_tokens == 7
    assert core.snapshot().blocks_free == 16


def test_a_fork_shares_the_prompt_and_copies_the_block_that_is_written() -> None:
    core = _core(depth=1)
    _submit(core, 1, [1, 2, 3, 4, 5], Sampling(max_tokens=3, seed=5), n=3)
    plan = _plan(core)
    assert plan.forks == [Fork(0, [(1, 1), (2, 2)])]
    held = core.snapshot()
    assert (held.tokens_held, held.blocks - held.blocks_free, held.block_size) == (5, 2, 4), "three share two blocks"
    progress_rows = _commit(core, plan, 6, 7, 8)
    assert [(row.sample, row.position, row.tokens) for row in progress_rows] == [(0, 0, [6]), (1, 0, [7]), (2, 0, [8])]
    plan = _plan(core)
    assert [row.slot for row in plan.rows] == [0, 1, 2]
    assert plan.block_copies == [(1, 2), (1, 3)], "the last holder writes in place"
    assert plan.table_writes == [TableWrite(0, 1, [2]), TableWrite(1, 1, [3])]


def test_samples_without_a_slot_wait_and_take_hits() -> None:
    core = _core(depth=1, max_num_seqs=2)
    _submit(core, 1, [1, 2, 3, 4, 5], Sampling(max_tokens=1, seed=5), n=3)
    plan = _plan(core)
    assert plan.forks == [Fork(0, [(1, 1)])]
    assert (core.snapshot().running, core.snapshot().waiting) == (2, 1)
    _commit(core, plan, 6, 7)
    last = _plan(core)
    assert (last.rows[0].start, last.new_sequences[0].sample) == (4, 2)
    assert _commit(core, last, 8)[0].finish_reason is FinishReason.LENGTH
    assert core.snapshot().prompt_tokens == 5, "a prompt is counted once"


def test_the_prompt_of_a_sequence_that_has_output_was_counted_where_that_began() -> None:
    core = _core(depth=1)
    for cached in (0, 4):
        before = core.snapshot()
        _submit(core, cached, [1, 2, 3, 4, 5, 6], Sampling(max_tokens=4, seed=5), prompt_len=5)
        _commit(core, _plan(core), 7)
        core.abort(cached)
        after = core.snapshot()
        assert after.prefix_hits - before.prefix_hits == cached
        assert (after.prompt_tokens, after.prompt_tokens_cached) == (0, 0)


def test_a_stray_row_behind_a_stop_is_dropped_and_never_published() -> None:
    core = _core()
    _submit(core, 1, [1, 2, 3], Sampling(max_tokens=9, seed=5, stop_token_ids=[7]))
    first, second = _plan(core), _plan(core)
    assert _commit(core, first, 7) == [ProgressRow(1, 0, 0, [7], finish_reason=FinishReason.STOP, scheduling=AT_ONCE)]
    assert core.snapshot().blocks_free == 15, "a plan in flight writes to it"
    assert _commit(core, second, 4) == []
    assert (core.snapshot().blocks_free, core.snapshot().blocks_cached) == (16, 0)


def test_min_tokens_are_the_workers_business_and_a_stop_ends() -> None:
    core = _core(depth=1)
    _submit(core, 1, [1, 2, 3, 7], Sampling(max_tokens=9, seed=5, stop_token_ids=[7], min_tokens=1), prompt_len=3)
    (row,) = _commit(core, _plan(core), 7)
    assert (row.position, row.tokens, row.finish_reason) == (1, [7], FinishReason.STOP)


def test_prompt_scores_go_on_as_they_come() -> None:
    core = _core(depth=1, max_num_batched_tokens=5)
    _submit(core, 1, list(range(7)), Sampling(max_tokens=0, seed=5, prompt_logprobs=0))
    scores = [TokenLogprobs(float(position), 1, [], []) for position in range(7)]
    first = _plan(core)
    progress_rows = core.commit(StepResult(EPOCH, first.step, [SampledRow(0, [], None, scores[1:6])]))
    assert progress_rows == [ProgressRow(1, 0, 0, [], None, scores[1:6], scheduling=AT_ONCE)]
    second = _plan(core)
    assert second.rows == [Row(0, 5, 2, 0)]
    progress_rows = core.commit(StepResult(EPOCH, second.step, [SampledRow(0, [], None, scores[6:])]))
    assert progress_rows == [ProgressRow(1, 0, 0, [], None, scores[6:], FinishReason.LENGTH)]


def test_a_result_without_its_token_is_the_workers_fault_and_changes_nothing() -> None:
    core = _core()
    _submit(core, 1, [1, 2, 3], Sampling(max_tokens=9, seed=5))
    plan = _plan(core)
    before = core.snapshot()
    for rows in ([], [SampledRow(0, [])], [SampledRow(0, [1, 2])], [SampledRow(3, [1])]):
        with pytest.raises(ProtocolError, match="step 0"):
            core.commit(StepResult(EPOCH, 0, rows))
    assert core.snapshot() == before
    assert _commit(core, plan, 4)


def test_an_error_of_a_worker_s_row_ends_that_sequence_alone() -> None:
    """GDD-07: its token does not count, its slot is free once no plan names it, and its neighbour goes on."""
    core = _core()
    for id in (1, 2):
        _submit(core, id, [id] * 5, Sampling(max_tokens=9, seed=5))
    first, second = _plan(core), _plan(core)
    wrong, right = SampledRow(0, [6], error="no token fits"), SampledRow(1, [7])
    rows = core.commit(StepResult(EPOCH, first.step, [wrong, right]))
    assert rows == [
        ProgressRow(1, 0, 0, [], finish_reason=FinishReason.ERROR, detail="no token fits", scheduling=AT_ONCE),
        ProgressRow(2, 0, 0, [7], scheduling=AT_ONCE),
    ]
    assert _commit(core, second, 8, 9) == [ProgressRow(2, 0, 1, [9])]
    third = _plan(core)
    assert (third.rows, third.released_slots) == ([Row(1, 6, 1, 1)], [0])
    assert core.snapshot().finished_error == 1


def test_an_error_before_the_prompt_is_computed_ends_all_samples() -> None:
    core = _core(depth=1)
    _submit(core, 1, list(range(20)), Sampling(max_tokens=9, seed=5), n=3)
    chunk = _plan(core)
    assert chunk.rows == [Row(0, 0, 16, 0)]
    rows = core.commit(StepResult(EPOCH, chunk.step, [SampledRow(0, [], error="it cannot be read")]))
    assert sorted((row.sample, row.finish_reason, row.detail) for row in rows) == [
        (sample, FinishReason.ERROR, "it cannot be read") for sample in range(3)
    ]
    assert core.idle
    assert core.plan(1.0) is None
    assert (core.snapshot().finished_error, core.snapshot().waiting) == (3, 0)


def test_a_preempted_sequence_that_comes_back_in_the_same_plan_gets_one_row() -> None:
    core = _core(depth=1, policy="priority", num_blocks=9)
    common, sampling = [1, 2, 3, 4, 5, 6, 7, 8], Sampling(max_tokens=1, seed=5)
    _submit(core, 1, [*common, *[1] * 8], sampling, priority=1)
    _submit(core, 2, [*common, *[2] * 8], sampling, priority=1)
    _commit(core, _plan(core))
    assert (core.snapshot().running, core.snapshot().blocks_free) == (2, 1)
    _submit(core, 3, [3] * 3, sampling, priority=0)  # needs one block, and one to spare
    plan = _plan(core)
    assert core.snapshot().preemptions == 1
    assert [pack_tokens([3] * 3), pack_tokens([*common, *[2] * 8])] == [new.tokens for new in plan.new_sequences]
    assert sorted(row.slot for row in plan.rows) == [0, 1, 2], "what it shares with the other is a hit now, so it fits"
    assert sum(row.count for row in plan.rows) <= 16


def test_a_row_says_how_long_its_sequence_waited_and_how_often_it_was_preempted() -> None:
    """API-04: a row says it once for each change, by the clock that the test passes in."""
    core = _core(depth=1, max_num_seqs=1, policy="priority")
    sampling = Sampling(max_tokens=3, seed=5)
    assert core.submit(Submit(1, pack_tokens([1, 2, 3]), 3, sampling, priority=1), 10.0) is None
    first = core.plan(12.5)
    assert first is not None
    assert [row.scheduling for row in _commit(core, first, 4)] == [SchedulingInfo(2.5, 0)]
    assert core.submit(Submit(2, pack_tokens([5]), 1, Sampling(max_tokens=1, seed=5)), 13.0) is None
    for now, expected in ((14.0, (1, SchedulingInfo(2.5, 1))), (15.0, (2, SchedulingInfo(2.0, 0))), (20.0, (1, None))):
        plan = core.plan(now)
        assert plan is not None
        assert core.snapshot().preemptions == 1
        assert [(row.id, row.scheduling) for row in _commit(core, plan, 6)] == [expected]
    assert core.idle


def test_samples_that_begin_together_were_admitted_together() -> None:
    """API-04: a fork shares its parent's prompt, and so its time in the queue; one without a slot waits on."""
    core = _core(depth=1, max_num_seqs=2)
    assert core.submit(Submit(1, pack_tokens([1, 2, 3]), 3, Sampling(max_tokens=1, seed=5), 3), 1.0) is None
    assert (core.snapshot().waiting, core.snapshot().waiting_deferred) == (3, 2), "two wait for their prompt"
    plan = core.plan(4.0)
    assert plan is not None
    assert [row.scheduling for row in _commit(core, plan, 7, 7)] == [SchedulingInfo(3.0, 0)] * 2
    assert (core.snapshot().waiting, core.snapshot().waiting_deferred) == (1, 0)
    plan = core.plan(6.0)
    assert plan is not None
    assert [row.scheduling for row in _commit(core, plan, 7)] == [SchedulingInfo(5.0, 0)]


def test_steps_are_counted_by_their_tokens_and_prompts_by_their_source() -> None:
    """API-04: vllm:iteration_tokens_total and vllm:prompt_tokens_by_source are made of these counts."""
    core = _core(depth=1)
    for id, prompt in ((1, list(range(12))), (2, [*range(8), 99])):
        _submit(core, id, prompt, Sampling(max_tokens=2, seed=5))
        while not core.idle:
            _commit(core, _plan(core), 50)
    state = core.snapshot()
    assert state.step_tokens[:4] == [3, 0, 1, 0], "three of 1, one of 12"
    assert (sum(state.step_tokens), state.step_tokens_sum) == (state.steps, 12 + 1 + 1 + 1)
    assert (state.prompt_tokens, state.prompt_tokens_cached) == (21, 8)
    assert state.prefix_caching
    core.lose_worker(2.0)
    _submit(core, 3, [1], Sampling(max_tokens=2, seed=5))
    assert core.snapshot().waiting_deferred == 1, "it waits for a worker, not for room"


def test_a_worker_lost_and_another_one() -> None:
    core = _core()
    _submit(core, 1, [1, 2, 3], Sampling(max_tokens=9, seed=5))
    first, second = _plan(core), _plan(core)
    _commit(core, first, 4)
    suspected = SchedulingInfo(0.0, 0, Suspicion(cleared_at=4, deaths_alone=1, start=3, end=4))
    assert core.lose_worker(2.0) == [ProgressRow(1, 0, 1, [], scheduling=suspected)]
    assert core.lose_worker(2.0) == [], "once is enough"
    assert (core.snapshot().worker_losses, core.snapshot().running, core.in_flight) == (1, 0, 0)
    assert core.plan(2.0) is None
    core.begin_epoch(Epoch("boot", 2), 16)
    again = _plan(core)
    assert (again.epoch, again.step, again.rows) == (Epoch("boot", 2), 0, [Row(0, 0, 4, 1)])
    assert again.new_sequences[0].tokens == pack_tokens([1, 2, 3, 4])
    assert _commit(core, second, 5) == [], "a result of the old epoch"
    assert _commit(core, again, 5) == [ProgressRow(1, 0, 1, [5], scheduling=AT_ONCE)], "it is no suspect any more"


def test_a_worker_that_leaves_and_another_one() -> None:
    core = _core()
    _submit(core, 1, [1, 2, 3], Sampling(max_tokens=9, seed=5))
    first, second = _plan(core), _plan(core)
    _commit(core, first, 4)
    with pytest.raises(AssertionError, match="owes results"):
        core.end_epoch()
    _commit(core, second, 5)
    core.end_epoch()
    state = core.snapshot()
    assert (state.worker_losses, state.running, state.waiting, state.waiting_deferred) == (0, 0, 1, 1)
    assert core.plan(2.0) is None
    assert core.lose_worker(2.0) == [], "it is gone already"
    core.begin_epoch(Epoch("boot", 2), 16)
    again = _plan(core)
    assert (again.epoch, again.step, again.rows) == (Epoch("boot", 2), 0, [Row(0, 0, 5, 1)])
    assert _commit(core, again, 6) == [ProgressRow(1, 0, 2, [6])], "it never was a suspect"


def test_suspects_still_run_alone_after_a_worker_has_left() -> None:
    core = _core()
    for id in (1, 2):
        _submit(core, id, [1, 2, 3], Sampling(max_tokens=9, seed=5))
    _plan(core)
    core.lose_worker(2.0)
    core.begin_epoch(Epoch("boot", 2), 16)
    core.end_epoch()
    core.begin_epoch(Epoch("boot", 3), 16)
    assert len(_plan(core).rows) == 1


def test_a_request_brings_its_suspicion() -> None:
    core = _core()
    _submit(core, 1, [1, 2], Sampling(max_tokens=9, seed=5))
    brought = {"resumed": True, "suspicion": Suspicion(3, 1, 2, 3)}
    _submit(core, 2, [1, 2, 3], Sampling(max_tokens=9, seed=5), prompt_len=2, **brought)
    plan = _plan(core)
    assert [new.tokens for new in plan.new_sequences] == [pack_tokens([1, 2, 3])], "it runs alone"
    died_again = SchedulingInfo(0.0, 0, Suspicion(cleared_at=4, deaths_alone=2, start=0, end=4))
    _plan(core)
    (row,) = core.lose_worker(2.0)
    assert (row.id, row.finish_reason, row.scheduling) == (2, FinishReason.ERROR, died_again)
    assert row.detail == "the worker died 2 times while it ran this request alone"


@pytest.mark.parametrize(
    ("resumed", "suspicion"), [(True, Suspicion(3)), (False, Suspicion(3, 1, 2, 3))], ids=["never alone", "new"]
)
def test_what_a_gateway_says_keeps_nobody_from_running(resumed: bool, suspicion: Suspicion) -> None:
    """Unless it names a worker that died while this request ran alone, which is possible only if it has run before."""
    core = _core()
    _submit(core, 1, [1, 2], Sampling(max_tokens=9, seed=5))
    for id in (2, 3):
        _submit(core, id, [1, 2, 3], Sampling(max_tokens=9, seed=5), prompt_len=2, resumed=resumed, suspicion=suspicion)
    plan = _plan(core)
    assert len(plan.new_sequences) == 3
    rows = _commit(core, plan, 6, 6, 6)
    assert [row.scheduling for row in rows] == [AT_ONCE] * 3, "and they are no suspects"


def test_a_flood_of_claims_does_not_stop_a_stream() -> None:
    core = _core(max_num_seqs=2)
    _submit(core, 1, [1, 2], Sampling(max_tokens=12, seed=5))
    _commit(core, _plan(core), 6)
    claims = {"resumed": True, "suspicion": Suspicion(3, 1, 2, 3)}
    for id in range(2, 12):
        _submit(core, id, [1, 2, 3], Sampling(max_tokens=1, seed=5), **claims)
    without = 0
    for _ in range(20):
        plan = _plan(core)
        rows = _commit(core, plan, *[6] * len([row for row in plan.rows if row.samples]))
        if any(row.id == 1 for row in rows):
            break
        without += 1
    assert without == 1, "for the one that runs alone"


def test_a_pool_too_small_for_what_was_promised_is_refused() -> None:
    core = _core()
    with pytest.raises(ConfigError, match="max-model-len"):
        core.begin_epoch(Epoch("boot", 2), 7)


def test_aborts_end_samples_in_every_place() -> None:
    core = _core(depth=1, max_num_seqs=1)
    _submit(core, 1, [1, 2, 3], Sampling(max_tokens=9, seed=5), n=3)
    _submit(core, 2, [4], Sampling(max_tokens=9, seed=5))
    assert core.abort(1, 2) == [ProgressRow(1, 2, 0, [], finish_reason=FinishReason.ABORT)], "not begun"
    assert core.abort(2) == [ProgressRow(2, 0, 0, [], finish_reason=FinishReason.ABORT)], "in the queue"
    plan = _plan(core)
    assert core.abort(1, 0) == [ProgressRow(1, 0, 0, [], finish_reason=FinishReason.ABORT, scheduling=AT_ONCE)], (
        "running"
    )
    assert core.abort(1, 0) == core.abort(1, 7) == core.abort(9) == []
    assert _commit(core, plan, 4) == []
    plan = _plan(core)
    assert plan.new_sequences[0].sample == 1
    assert _commit(core, plan, 5) == [ProgressRow(1, 1, 0, [5], scheduling=AT_ONCE)]
    assert [row.position for row in core.abort(1)] == [1]
    assert core.idle
    assert (core.snapshot().finished_abort, core.snapshot().blocks_free) == (4, 16)


def test_repr_is_the_state_in_one_line() -> None:
    core = _core()
    _submit(core, 1, [1, 2, 3, 4, 5], Sampling(max_tokens=9, seed=5))
    _plan(core)
    assert repr(core) == (
        "<Scheduler step=1 in_flight=1 <Queues 1 running, 0 stopping, 0 waiting> "
        "<BlockManager <BlockPool 14/16 free, 0 pinned> <PrefixIndex 0 blocks> 5 tokens held>>"
    )

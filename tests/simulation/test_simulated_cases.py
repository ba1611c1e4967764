"""Tests the core in situations from bug reports of other servers; docstrings have the ids of the cases.

All run with the page-memory oracle and the invariants of the simulation, so no test here repeats that a request gets
the tokens that it gets alone.
"""

import sys
from array import array
from random import Random

from simulated_engine import SimulatedEngine
from simulated_worker import VOCABULARY

from services.scheduler.core import Limits
from services.scheduler.core.prefix import PrefixIndex
from shared.protocol import FinishReason, Refusal, Refused, Suspicion


def _limits(**changes: object) -> Limits:
    sizes: dict[str, object] = {
        "num_blocks": 40,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 640,
    }
    return Limits(**{**sizes, **changes})  # type: ignore[arg-type]


def _prompt(length: int, start: int = 0) -> list[int]:
    return [(start + index * index) % VOCABULARY for index in range(length)]


def _first_step(engine: SimulatedEngine, id: int) -> int:
    step = engine.clients[id, 0].first_step
    assert step is not None
    return step


def test_what_never_fits_is_refused_and_the_rest_is_served() -> None:
    """SCH-01."""
    engine = SimulatedEngine(_limits())
    refused = engine.submit(_prompt(900), 16)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.TOO_LONG
    small = engine.accept(_prompt(10), 16)
    too_much = engine.submit(_prompt(500), 1000)
    assert isinstance(too_much, Refused)
    assert too_much.reason is Refusal.TOO_LONG
    engine.accept(_prompt(500), 140)  # as much as the pool holds
    engine.run(200)
    engine.check_finished()
    assert engine.clients[small, 0].finish_reason is FinishReason.LENGTH
    assert engine.core.snapshot().preemptions <= 1


def test_a_small_pool_preempts_and_changes_nothing() -> None:
    """SCH-02, SCH-03."""
    engine = SimulatedEngine(_limits(num_blocks=50, max_model_len=330))
    for index in range(8):
        engine.accept(_prompt(20, index), 300, prompt_logprobs=0)
    engine.run(4000)
    engine.check_finished()
    state = engine.core.snapshot()
    assert state.preemptions > 0
    assert state.generation_tokens == 8 * 300, "nothing was sampled twice"
    assert state.prompt_tokens == 8 * 20


def test_samples_that_do_not_fit_together_take_turns() -> None:
    """SCH-05."""
    engine = SimulatedEngine(_limits(num_blocks=42, max_model_len=224))  # a sample needs 14, of which 1 is shared
    first = engine.accept(_prompt(24), 200, n=5)
    engine.accept(_prompt(24, 3), 200, n=5)
    engine.step()
    engine.step()
    shared = engine.core.snapshot()
    assert shared.tokens_held < 2 * 5 * 24, "blocks of the prompt are counted once"
    engine.run(4000)
    engine.check_finished()
    assert all(len(engine.clients[first, sample].output) == 200 for sample in range(5))
    assert len({tuple(engine.clients[first, sample].output) for sample in range(5)}) == 5, "each sample has its noise"


def test_an_urgent_request_starts_at_once() -> None:
    """SCH-07."""
    for ageing in (0.0, 1.0):
        limits = _limits(
            max_num_seqs=4, num_blocks=400, policy="priority", priority_ageing=ageing, max_num_batched_tokens=64
        )
        engine = SimulatedEngine(limits)
        low = [engine.accept(_prompt(16, index), 500, priority=10) for index in range(30)]
        for _ in range(40):
            engine.step()
        before = engine.core.snapshot()
        assert (before.running, before.preemptions) == (4, 0)
        urgent = engine.accept(_prompt(30), 10, priority=0)
        while engine.clients[urgent, 0].finish_reason is None:
            engine.step()
        assert _first_step(engine, urgent) <= before.steps + 6, "it waits for the plans in flight, not for the others"
        for _ in range(20):
            engine.step()
        assert engine.core.snapshot().preemptions == 1, "one was preempted, and preempted nobody in its turn"
        assert engine.core.snapshot().running == 4, "it is back"
        assert all(engine.clients[id, 0].output for id in low[:4])
        assert not any(engine.clients[id, 0].output for id in low[4:])
        for id in low:
            engine.abort(id)
        engine.run(3)
        engine.check_finished()


def test_ageing_bounds_the_wait_of_the_least_urgent() -> None:
    """SCH-07."""
    engine = SimulatedEngine(_limits(max_num_seqs=1, policy="priority", priority_ageing=0.1))
    patient = engine.accept(_prompt(8), 4, priority=5)
    for _ in range(300):
        if engine.core.snapshot().waiting < 3:
            engine.accept(_prompt(8), 4, priority=0)
        engine.step()
    assert engine.clients[patient, 0].finish_reason is FinishReason.LENGTH


def test_a_long_prompt_waits_for_room_and_does_not_thrash() -> None:
    """SCH-09."""
    limits = _limits(num_blocks=45, max_model_len=640, max_num_batched_tokens=64)
    engine = SimulatedEngine(limits)
    running = engine.accept(_prompt(200), 200)  # it needs 25 blocks in the end; 20 remain, room for about 300 tokens
    for _ in range(10):
        engine.step()
    start = engine.core.snapshot()
    long = engine.accept(_prompt(600, 3), 20)
    engine.run(1000)
    engine.check_finished()
    state = engine.core.snapshot()
    assert state.preemptions == 0
    assert _first_step(engine, long) > start.steps + 150, "it was admitted when the other had ended"
    assert state.steps <= 230 + 600 // 64 + 20, "a token of the running one in every step"
    assert engine.clients[running, 0].finish_reason is FinishReason.LENGTH


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    """SCH-10."""
    limits = _limits(num_blocks=1400, max_model_len=21_000, max_num_seqs=16)
    engine = SimulatedEngine(limits, checked=False)
    stream = engine.accept(_prompt(20, 5), 120)
    for _ in range(5):
        engine.step()
    long = engine.accept(_prompt(20_000), 4)
    engine.step()
    came = engine.core.snapshot().steps
    short = [engine.accept(_prompt(40, index), 8) for index in range(10)]
    while not engine.core.idle:
        length = len(engine.clients[stream, 0].output)
        engine.step()
        assert length == 120 or len(engine.clients[stream, 0].output) == length + 1, "a stream never stalls"
    firsts = [_first_step(engine, id) - came for id in short]
    assert max(firsts) <= 8
    assert _first_step(engine, long) - came > 70, "a prompt of 20,000 takes 79 steps alone"
    assert _first_step(engine, long) - came < 90, "and hardly more in company"


def test_a_burst_is_served_or_refused_at_once() -> None:
    """SCH-12."""
    rng = Random(12)
    engine = SimulatedEngine(_limits(max_num_seqs=16, num_blocks=60, max_queued_requests=100), checked=False)
    outcomes = [engine.submit(_prompt(rng.randint(1, 60)), rng.randint(1, 20)) for _ in range(500)]
    refused = [answer for answer in outcomes if isinstance(answer, Refused)]
    assert len(refused) == 400
    assert all(one.reason is Refusal.QUEUE_FULL and one.retry_after >= 1.0 for one in refused)
    engine.accept(_prompt(9), 20, output=[1, 2, 3])  # a request that brings output is never refused for load
    engine.run(1000)
    engine.check_finished()
    assert engine.core.snapshot().accepted == 101


def test_repeats_at_and_around_block_boundaries() -> None:
    """PFX-01."""
    for caching in (True, False):
        engine = SimulatedEngine(_limits(prefix_caching=caching))
        for length in (15, 16, 17, 31, 32, 33, 48, 33):
            for _ in range(3):
                id = engine.accept(_prompt(length), 20, seed=length)
                engine.run(100)
                client = engine.clients[id, 0]
                assert client.finish_reason is FinishReason.LENGTH
                assert client.cached_tokens <= length - 1
        assert (engine.core.snapshot().prefix_hits > 0) == caching
        engine.check_finished()


def test_many_prompts_of_few_prefixes_in_a_small_pool() -> None:
    """PFX-06."""
    rng = Random(6)
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(10, 120))] for _ in range(30)]
    engine = SimulatedEngine(_limits(max_model_len=200))
    sent = 0
    while sent < 200 or not engine.core.idle:
        while sent < 200 and len(engine.core._queues.requests) < 8:
            tail = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]
            engine.accept(rng.choice(prefixes) + tail, rng.randint(1, 12))
            sent += 1
        engine.step()
    engine.check_finished()
    assert engine.core.snapshot().prefix_hits > 1000


def test_equal_hashes_do_not_make_equal_blocks() -> None:
    """PFX-08: the index compares what was hashed."""
    index, tokens = PrefixIndex(1), array("i", [7])
    nodes = [5 + at * sys.hash_info.modulus for at in range(4)]
    assert len({hash((node, tokens.tobytes())) for node in nodes}) == 1
    for block, node in enumerate(nodes):
        index.publish(node, tokens, block)
    assert [index.match_prefix(tokens, node)[0].block for node in nodes] == [0, 1, 2, 3]
    assert not index.match_prefix(tokens, 5 + 4 * sys.hash_info.modulus)


def test_hits_are_counted_in_tokens_of_whole_blocks() -> None:
    """PFX-09."""
    for prefix in (15, 16, 17, 31, 32, 33):
        engine = SimulatedEngine(_limits())
        engine.accept(_prompt(prefix), 1)
        engine.run(20)
        before = engine.core.snapshot()
        id = engine.accept(_prompt(prefix) + [VOCABULARY - 1] * 20, 1)
        engine.run(20)
        after = engine.core.snapshot()
        assert engine.clients[id, 0].cached_tokens == prefix // 16 * 16
        assert after.prefix_hits - before.prefix_hits == prefix // 16 * 16
        assert after.prefix_queries - before.prefix_queries == prefix + 20


def test_at_idle_nothing_is_held() -> None:
    """PFX-10."""
    rng = Random(10)
    engine = SimulatedEngine(_limits(max_num_batched_tokens=20))
    system = _prompt(50)
    history = list(system)
    for turn in range(6):
        id = engine.accept(history + _prompt(7, turn), 12, n=rng.choice([1, 3]))
        engine.accept(system + _prompt(5, turn + 2), 9)
        engine.run(200)
        history += _prompt(7, turn) + engine.clients[id, 0].output
        engine.check_finished()
    state = engine.core.snapshot()
    assert 0 < state.blocks_cached <= state.blocks_free == state.blocks
    engine.lose_worker()
    engine.begin_epoch()
    assert engine.core.snapshot().blocks_cached == 0
    engine.check_finished()


def test_what_is_aborted_in_the_queue_is_never_computed() -> None:
    """ABT-04."""
    engine = SimulatedEngine(_limits(max_num_seqs=1))
    engine.accept(_prompt(8), 50)
    queued = [engine.accept(_prompt(30, index), 5) for index in range(10)]
    for _ in range(5):
        engine.step()
    for id in queued:
        engine.abort(id)
    live = engine.accept(_prompt(9), 5)
    engine.run(100)
    assert engine.clients[live, 0].finish_reason is FinishReason.LENGTH
    assert engine.core.snapshot().prompt_tokens == 8 + 9


def test_aborts_of_shared_prefixes_leave_no_reference() -> None:
    """ABT-08."""
    rng = Random(8)
    engine = SimulatedEngine(_limits(num_blocks=120, max_model_len=400, max_num_seqs=20))
    prefix = _prompt(20 * 16)
    for _ in range(6):
        ids = [engine.accept(prefix + _prompt(5, index), 40) for index in range(20)]
        rng.shuffle(ids)
        for id in ids:
            for _ in range(rng.randint(0, 2)):
                engine.step()
            engine.abort(id)
        engine.run(5)
        engine.check_finished()
    for index in range(8):
        engine.accept([index % VOCABULARY] * 390, 5)  # evicts everything
    engine.run(200)
    engine.check_finished()


def test_late_results_and_repeated_aborts_do_no_harm() -> None:
    """ABT-11."""
    for depth in (1, 2, 3, 5):
        engine = SimulatedEngine(_limits(depth=depth))
        aborted, kept = engine.accept(_prompt(20), 30), engine.accept(_prompt(21), 30)
        while engine.plan() is not None:
            pass
        assert engine.core.in_flight == depth
        for _ in range(2):
            engine.abort(aborted)
        engine.abort(4711)
        held = engine.core.snapshot().blocks_free
        engine.run(100)
        assert engine.core.snapshot().blocks_free > held
        engine.abort(kept)
        engine.check_finished()
        state = engine.core.snapshot()
        assert (state.finished_abort, state.finished_length) == (1, 1)


def test_an_abort_frees_within_two_steps() -> None:
    engine = SimulatedEngine(_limits())
    id = engine.accept(_prompt(100), 500)
    for _ in range(10):
        engine.step()
    while engine.plan() is not None:
        pass
    engine.abort(id)
    assert engine.core.in_flight == 2
    engine.deliver()
    assert engine.core.snapshot().blocks_free < 40
    engine.deliver()
    assert engine.core.snapshot().blocks_free == 40


def test_a_worker_that_dies_again_and_again_loses_no_token() -> None:
    engine = SimulatedEngine(_limits())
    for index in range(6):
        engine.accept(_prompt(30, index), 60, n=2, prompt_logprobs=0)
    for _ in range(12):
        for _ in range(9):
            engine.step()
        engine.lose_worker()
        engine.begin_epoch()
    engine.run(400)
    engine.check_finished()
    assert engine.core.snapshot().finished_length == 12
    assert engine.core.snapshot().generation_tokens == 12 * 60


def test_only_a_poison_request_is_ended_with_an_error() -> None:
    for deadly in (0, 25, 32):  # in the first chunk, at the end of the prompt, in the output
        engine = SimulatedEngine(_limits(prefix_caching=False))
        ids = [engine.accept(_prompt(26, index), 20) for index in range(8)]
        engine.poison[ids[5]] = deadly
        engine.run(400)
        engine.check_finished()
        ends = {id: engine.clients[id, 0].finish_reason for id in ids}
        assert [id for id, finish in ends.items() if finish is FinishReason.ERROR] == [ids[5]]
        assert list(ends.values()).count(FinishReason.LENGTH) == 7
        assert engine.core.snapshot().worker_losses <= 6, "1 at first, 3 to single it out of 8, and 2 alone at most"


def _lose_worker_at(engine: SimulatedEngine, *counts: int) -> None:
    """Let workers die, each after so many steps, while they run what there is."""
    for steps in counts:
        for _ in range(steps):
            engine.step()
        assert engine.core.in_flight
        engine.lose_worker()
        engine.begin_epoch()


def test_deaths_in_a_long_life_make_no_culprit() -> None:
    engine = SimulatedEngine(_limits())
    id = engine.accept(_prompt(10), 200)
    _lose_worker_at(engine, 20, 20, 20, 20)
    engine.run(300)
    assert engine.clients[id, 0].finish_reason is FinishReason.LENGTH


def test_deaths_while_a_prompt_is_computed_again_make_no_culprit() -> None:
    """Neither of a lone prompt in chunks, nor of the output behind it: nothing was being computed at both deaths."""
    engine = SimulatedEngine(_limits(max_num_batched_tokens=16, prefix_caching=False))
    id = engine.accept(_prompt(400), 200)
    _lose_worker_at(engine, 60, 20, 10)  # a chunk has 16 tokens
    assert engine.clients[id, 0].scheduling.suspicion.deaths_alone == 3
    engine.run(400)
    assert engine.clients[id, 0].finish_reason is FinishReason.LENGTH
    assert engine.clients[id, 0].scheduling.suspicion == Suspicion()


def test_deaths_wherever_a_request_stands_make_a_culprit_in_the_end() -> None:
    engine = SimulatedEngine(_limits(max_num_batched_tokens=16, prefix_caching=False))
    id = engine.accept(_prompt(400), 200)
    _lose_worker_at(engine, 60, 20, 10, 1)
    assert engine.clients[id, 0].finish_reason is FinishReason.ERROR
    engine.check_finished()


def test_deaths_at_the_same_chunk_make_a_culprit() -> None:
    engine = SimulatedEngine(_limits(max_num_batched_tokens=16, prefix_caching=False))
    id = engine.accept(_prompt(400), 200)
    _lose_worker_at(engine, 20, 20)
    assert engine.clients[id, 0].finish_reason is FinishReason.ERROR


def test_scoring_a_prompt_samples_nothing() -> None:
    engine = SimulatedEngine(_limits())
    id = engine.accept(_prompt(640), 0, prompt_logprobs=0, n=2)  # as long as the context
    engine.run(20)
    engine.check_finished()
    assert len(engine.clients[id, 0].scores) == 639
    assert engine.core.snapshot().generation_tokens == 0


def _hits(engine: SimulatedEngine, salt: str = "") -> int:
    """Return the cached tokens of the same long prompt under a salt. It runs alone."""
    id = engine.accept(_prompt(64), 2, salt=salt)
    engine.run(20)
    return engine.clients[id, 0].cached_tokens


def test_prompts_find_those_of_their_salt_only() -> None:
    engine = SimulatedEngine(_limits())
    assert [_hits(engine, salt) for salt in ("", "1", "2", "1", "2", "")] == [0, 0, 0, 63, 63, 63]
    engine.check_finished()


def test_a_reset_forgets_what_is_free_and_what_runs() -> None:
    engine = SimulatedEngine(_limits(max_num_batched_tokens=40))
    assert [_hits(engine), _hits(engine)] == [0, 63]
    engine.reset_prefix_cache()
    assert [_hits(engine), _hits(engine)] == [0, 63]
    running = engine.accept(_prompt(640 - 50, 5), 50)
    for _ in range(3):
        engine.step()
    engine.reset_prefix_cache()  # in the middle of its prompt
    engine.run(100)
    assert engine.clients[running, 0].cached_tokens == 0
    again = engine.accept(_prompt(640 - 50, 5), 50)
    engine.run(100)
    assert engine.clients[again, 0].cached_tokens == 0, "nothing of the one that was running is found"
    assert engine.core.snapshot().prefix_resets == 2
    engine.check_finished()


def test_a_reset_forgets_what_a_preempted_sequence_is_still_computing() -> None:
    """Its block is filled by a plan that is in flight at the reset, and would be found when it comes back."""
    engine = SimulatedEngine(_limits(max_num_seqs=1, policy="priority"))
    low = engine.accept(_prompt(64), 9, priority=5)
    engine.plan()
    engine.accept(_prompt(64, 3), 9)
    engine.plan()
    assert engine.core.snapshot().preemptions == 1
    engine.reset_prefix_cache()
    engine.run(100)  # which checks that nothing from before is found
    assert engine.clients[low, 0].finish_reason is FinishReason.LENGTH
    engine.check_finished()

"""Tests of blocks that go to host memory and come back, in situations that random workloads seldom reach."""

from array import array

import pytest
from simulated_engine import SimulatedEngine
from simulated_worker import VOCABULARY

from services.scheduler.core import Limits
from services.scheduler.core.host_tier import HostTier
from services.scheduler.core.step_time import StepTime
from services.scheduler.core.swap_policy import SwapPolicy

SIZE = 4


def limits(**changes: object) -> Limits:
    sizes: dict[str, object] = {
        "num_blocks": 12,
        "block_size": SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 40,
        "preemption_mode": "swap",
    }
    return Limits(**{**sizes, **changes})  # type: ignore[arg-type]


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + index * index) % VOCABULARY for index in range(length)]


def finish(engine: SimulatedEngine) -> None:
    engine.run(1000)
    engine.check_finished()


@pytest.mark.parametrize(("depth", "num_stages"), [(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (5, 4)])
def test_nothing_that_was_computed_is_computed_again(depth: int, num_stages: int) -> None:
    engine = SimulatedEngine(limits(depth=depth, num_stages=num_stages, max_num_seqs=3), host=(40, 0.0))
    for index in range(3):
        engine.accept(prompt(8, index), 30)
    finish(engine)
    state = engine.core.snapshot()
    assert state.preemptions > 0
    assert state.preemptions_swapped == state.preemptions
    stray = engine.events["stray rows"]
    assert state.step_tokens_sum <= 3 * (8 + 30 - 1) + stray, "each position once"


def test_host_memory_that_is_too_small_is_no_reason_to_wait() -> None:
    """SWP-01: what finds no room there is computed again."""
    engine = SimulatedEngine(limits(num_blocks=14, max_num_seqs=8), host=(6, 0.0))
    for index in range(20):
        engine.accept(prompt(9, index), 30, n=8)
    engine.run(20_000)
    engine.check_finished()
    state = engine.core.snapshot()
    assert 0 < state.preemptions_swapped < state.preemptions


def test_without_host_memory_all_is_computed_again() -> None:
    engine = SimulatedEngine(limits())
    for index in range(4):
        engine.accept(prompt(8, index), 30)
    finish(engine)
    state = engine.core.snapshot()
    assert state.preemptions > 0
    assert (state.preemptions_swapped, state.blocks_swapped_out, state.host_prefix_queries) == (0, 0, 0)


def test_a_prefix_that_the_device_has_reused_comes_back() -> None:
    """Its last token is computed, as after a hit on the device, and what comes back is shared at once."""
    engine = SimulatedEngine(limits(), host=(40, 0.0))
    shared = prompt(16)
    engine.accept(shared, 1)
    finish(engine)
    for index in range(1, 4):
        engine.accept(prompt(38, index), 1)
        finish(engine)
    before = engine.core.snapshot()
    assert before.blocks_swapped_out >= 4
    for _ in range(2):
        engine.accept(shared, 3)
    finish(engine)
    state = engine.core.snapshot()
    # the second shares three blocks; the fourth of each is its own, since the last token is computed in it
    assert state.host_prefix_hits - before.host_prefix_hits == 15 + 3
    assert state.blocks_swapped_in - before.blocks_swapped_in == 5


def test_the_beginning_of_what_comes_back_is_reused_last() -> None:
    engine = SimulatedEngine(limits(), host=(40, 0.0))
    shared = prompt(16)
    for tokens in (shared, *(prompt(38, index) for index in range(1, 4)), [*shared, 1]):
        engine.accept(tokens, 1)
        finish(engine)
    assert engine.core.snapshot().blocks_swapped_in == 4
    tier = engine.core._block_manager.host_tier
    blocks = [entry.block for entry in tier.match_prefix(array("i", shared), "0:")]
    assert [block for block in tier.pool._free if block in blocks] == blocks[::-1]


def test_what_comes_back_stays_and_is_not_copied_again() -> None:
    engine = SimulatedEngine(limits(), host=(80, 0.0))
    for _ in range(4):
        for index in range(4):
            engine.accept(prompt(38, index), 1)
            finish(engine)
    state = engine.core.snapshot()
    assert state.blocks_swapped_out <= 4 * 9
    assert state.blocks_swapped_in > state.blocks_swapped_out


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
def test_the_mode_decides_for_victims(mode: str) -> None:
    engine = SimulatedEngine(limits(preemption_mode=mode), measured=(0.01, 0.001), host=(40, 0.001))
    for index in range(4):
        engine.accept(prompt(8, index), 30)
    finish(engine)
    state = engine.core.snapshot()
    assert state.preemptions > 0
    assert bool(state.preemptions_swapped) == (mode != "recompute")


@pytest.mark.parametrize(("block_seconds", "cheaper"), [(0.0, False), (0.0019, True), (0.0021, False)])
def test_a_copy_there_and_back_is_weighed_against_its_tokens(block_seconds: float, cheaper: bool) -> None:
    """A bandwidth that was not measured says nothing."""
    step_time = StepTime()
    step_time.restart(0.01, 0.001)
    policies = {mode: SwapPolicy(mode, SIZE, step_time) for mode in ("auto", "swap", "recompute")}
    for policy in policies.values():
        policy.restart(block_seconds)
    assert policies["auto"].swaps(2, 2 * SIZE) is policies["auto"].keeps is policies["recompute"].keeps is cheaper
    assert policies["swap"].swaps(2, 2 * SIZE) is policies["swap"].keeps is True
    assert not policies["recompute"].swaps(2, 2 * SIZE)


def test_a_sequence_that_was_swapped_goes_on_after_a_reset() -> None:
    engine = SimulatedEngine(limits(max_num_seqs=3), host=(40, 0.0))
    for index in range(3):
        engine.accept(prompt(8, index), 30)
    while not engine.core.snapshot().swapped:
        engine.step()
    engine.reset_prefix_cache()
    assert engine.core.snapshot().swapped
    finish(engine)
    assert engine.core.snapshot().step_tokens_sum <= 3 * (8 + 30 - 1) + engine.events["stray rows"]


def test_a_victim_publishes_nothing_from_before_a_reset() -> None:
    """Even if a later sequence has computed and published the same content, which the device then reuses."""
    engine = SimulatedEngine(limits(policy="priority"), host=(40, 0.0))
    shared = prompt(12)
    engine.accept(shared, 20, priority=2)
    engine.step()
    engine.reset_prefix_cache()
    engine.accept([*shared, 1], 1, priority=1)
    while engine.core.snapshot().waiting or engine.core.snapshot().running > 1:
        engine.step()
    engine.accept(prompt(38, 1), 1)
    while not engine.core.snapshot().swapped:
        engine.step()
    engine.accept([*shared, 2], 1, priority=1)
    finish(engine)
    assert engine.core.snapshot().host_prefix_hits > 0, "the engine has checked when they were computed"


def test_a_victims_copies_are_not_reused_to_make_room_for_the_rest() -> None:
    tier = HostTier(2, SIZE)
    contents = [(("", array("i", prompt(SIZE, start)).tobytes()), start + 1) for start in range(2)]
    for block, (content, node) in enumerate(contents):
        tier.keep(content, node, block)
    tier.unpin([destination for _, destination in tier.take_moves()[0]])
    held = tier.hold([5, 6], contents[:1])  # of which the first has the content that was unused for longest
    assert held is not None
    assert len(set(held)) == 2
    assert held[0] == tier.index.find(contents[0][0]).block
    assert tier.take_moves() == ([(6, held[1])], [])


def test_what_is_saved_first_is_reused_first() -> None:
    tier = HostTier(2, SIZE)
    contents = [(("", array("i", prompt(SIZE, start)).tobytes()), start + 1) for start in range(3)]
    for block in (0, 1, 0, 2):  # the second time, the first content is the last one that was needed
        tier.keep(*contents[block], block)
        tier.unpin([destination for _, destination in tier.take_moves()[0]])
    assert [tier.index.find(content) is not None for content, _ in contents] == [True, False, True]

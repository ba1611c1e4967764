"""Tests that a request of many samples takes turns with its neighbours, in the simulation and its checks."""

import pytest
from simulated_engine import SimulatedEngine
from simulated_worker import VOCABULARY

from services.scheduler.core import Limits
from shared.protocol import FinishReason, Refusal, Refused

SLOTS = 8


def _engine(**changes: object) -> SimulatedEngine:
    sizes: dict[str, object] = {
        "num_blocks": 400,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": 64,
        "max_model_len": 400,
    }
    return SimulatedEngine(Limits(**{**sizes, **changes}))  # type: ignore[arg-type]


def _prompt(start: int) -> list[int]:
    return [(start + index * index) % VOCABULARY for index in range(9)]


def _large(engine: SimulatedEngine, prompts: int, n: int, max_tokens: int) -> list[int]:
    """Submit one user's request of several prompts, as a gateway does."""
    return [engine.accept(_prompt(at), max_tokens, n=n, samples_before=at * n) for at in range(prompts)]


def _steps(engine: SimulatedEngine, count: int, seconds: float) -> None:
    """Take `count` steps of `seconds` each."""
    for _ in range(count):
        engine.now += seconds
        engine.plan()
        if engine.results:
            engine.deliver()


@pytest.mark.parametrize(("prompts", "n"), [(6, 6), (36, 1), (1, 36)])
@pytest.mark.parametrize("blocks", [400, 60])
def test_a_neighbour_is_served_while_a_large_request_has_all_slots(prompts: int, n: int, blocks: int) -> None:
    """LOOP-02: a one-token request waits for some steps, not for the outputs of the large request."""
    engine = _engine(num_blocks=blocks)
    large = _large(engine, prompts, n, max_tokens=300)
    _steps(engine, 20, 0.05)
    if blocks == 400:
        assert engine.core.snapshot().running == SLOTS
    for at in range(5):
        neighbour = engine.accept(_prompt(100 + at), 1)
        _steps(engine, 12, 0.05)
        assert engine.clients[neighbour, 0].finish_reason is FinishReason.LENGTH, "it was served between"
    engine.run(40_000)
    engine.check_finished()
    assert all(engine.clients[id, sample].finish_reason is FinishReason.LENGTH for id in large for sample in range(n))


def test_requests_within_their_share_are_never_preempted() -> None:
    """Requests of equal priority, each with samples for at most half the slots, cost no work that was done."""
    engine = _engine()
    for at in range(10):
        engine.accept(_prompt(at), 30, n=SLOTS // 2)
        _steps(engine, 3, 0.05)
    engine.run(2000)
    engine.check_finished()
    assert engine.core.snapshot().preemptions == 0
    _large(engine, 5, 5, 30)
    engine.run(2000)
    engine.check_finished()
    assert engine.core.snapshot().preemptions <= SLOTS // 2, "its own first samples may come late, once"


def test_later_samples_wait_no_longer_than_their_turn() -> None:
    """Neighbours keep coming, but each sample of the large request has its fixed place among them."""
    engine = _engine()
    (large,) = _large(engine, 1, 3 * SLOTS, max_tokens=10)
    for at in range(400):
        if engine.core.snapshot().waiting < SLOTS:
            engine.accept(_prompt(at), 10)
            engine.accept(_prompt(at), 10)
        _steps(engine, 1, 10.0)
    assert all(engine.clients[large, sample].finish_reason is FinishReason.LENGTH for sample in range(3 * SLOTS))
    engine.run(2000)
    engine.check_finished()


def test_the_queue_counts_samples() -> None:
    """LOOP-02: samples that have not started fill the queue too, and a request counts with all of its samples."""
    engine = _engine(max_queued_requests=20)
    engine.accept(_prompt(0), 5, n=15)
    refused = engine.submit(_prompt(1), 5, n=6)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.QUEUE_FULL
    assert "15 requests are waiting" in refused.detail
    engine.accept(_prompt(2), 5, n=5)
    assert isinstance(engine.submit(_prompt(3), 5), Refused)
    engine.run(500)
    engine.accept(_prompt(4), 5, n=100)  # alone, it may be more than the queue is long
    engine.run(500)
    engine.check_finished()

"""Tests in the simulation that streams wait little for prompts, and prompts come to their end."""

import pytest
from mutants import CORE, mutated
from simulated_engine import SimulatedEngine
from simulated_worker import VOCABULARY, StepCosts

from services.scheduler.core import Limits
from shared.protocol import FinishReason

TARGET = 0.1
COSTS = StepCosts(step=0.02, row=0.004, token=0.001, context=1e-6)  # a prompt's 1,000th token costs 0.002
STREAMS = 8


def _engine(costs: StepCosts = COSTS, wrong: float = 1.0, target: float = TARGET) -> SimulatedEngine:
    """Return an engine with streams. Its worker has measured `wrong` times what its steps cost."""
    limits = Limits(
        num_blocks=1000,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        max_model_len=1200,
        max_step_seconds=target,
        prefix_caching=False,
    )
    engine = SimulatedEngine(limits, costs=costs, measured=(wrong * costs.step, wrong * costs.token))
    for index in range(STREAMS):
        engine.accept(_prompt(32, index), 1100)
    for _ in range(50):
        engine.step()
    assert all(client.output for client in engine.clients.values())
    return engine


def _prompt(length: int, start: int = 0) -> list[int]:
    return [(start + index * index) % VOCABULARY for index in range(length)]


def _seconds_of_steps_until_done(engine: SimulatedEngine, *ids: int) -> list[float]:
    """Run until the first tokens of the requests have come; return the seconds of each step."""
    first = len(engine.plans)
    while not all(engine.clients[id, 0].output for id in ids):
        engine.step()
    return [engine.costs.seconds(plan.rows) for plan in engine.plans[first:]]


@pytest.mark.parametrize("wrong", [0.25, 1.0, 4.0])
def test_steps_stay_near_the_target_whatever_the_worker_has_measured(wrong: float) -> None:
    engine = _engine(wrong=wrong)
    first = _seconds_of_steps_until_done(engine, engine.accept(_prompt(1000, 1), 1))
    second = _seconds_of_steps_until_done(engine, engine.accept(_prompt(1000, 2), 1))
    assert max(second) < 1.1 * TARGET, "it has learned"
    assert len(first) + len(second) < 2 * 1000 / 16, "and uses the time"


@pytest.mark.parametrize(
    "mutant",
    [
        ("step_time:StepTime.observe", "seconds <= 0", "True"),
        ("scheduler:Scheduler.commit", "plan.num_tokens - plan.num_chunked, plan.num_chunked", "plan.num_tokens, 0"),
    ],
    ids=["nothing is learned", "all positions count as rows"],
)
def test_a_mutant_that_does_not_learn_keeps_them_waiting(mutant: tuple[str, str, str]) -> None:
    with mutated(CORE, [mutant]):
        engine = _engine(wrong=0.25)
        _seconds_of_steps_until_done(engine, engine.accept(_prompt(1000, 1), 1))
        second = _seconds_of_steps_until_done(engine, engine.accept(_prompt(1000, 2), 1))
    assert max(second) > 1.2 * TARGET


def test_the_checks_find_a_mutant_that_forgets_the_time_of_the_streams_themselves() -> None:
    with mutated(CORE, [("planner:Planner._budget", "limits.max_step_seconds, rows", "limits.max_step_seconds, 0")]):
        engine = _engine()
        with pytest.raises(AssertionError, match="streams do not wait for prompts"):
            _seconds_of_steps_until_done(engine, engine.accept(_prompt(1000, 1), 1))


def test_without_a_target_a_prompt_takes_what_a_step_holds() -> None:
    engine = _engine(target=0.0)
    assert len(_seconds_of_steps_until_done(engine, engine.accept(_prompt(1000, 1), 1))) <= 6


def test_a_prompt_ends_beside_streams_that_take_too_long_by_themselves() -> None:
    """LOOP-02: it gets a chunk in every step."""
    engine = _engine(COSTS._replace(row=0.02))
    steps = len(_seconds_of_steps_until_done(engine, engine.accept(_prompt(640, 1), 1)))
    assert 640 // 16 <= steps <= 640 // 16 + 3


def test_more_prompts_in_line_get_more_of_a_step() -> None:
    engine = _engine()
    waiting = [engine.accept(_prompt(160, index), 1) for index in range(8)]
    engine.step()
    counts = [row.count for row in engine.plans[-1].rows if row.count > 1]
    assert sum(counts) == 8 * 16, "though that takes longer than the target"
    assert min(counts) == 8
    assert max(counts) == counts[0]
    _seconds_of_steps_until_done(engine, *waiting)
    assert all(engine.clients[id, 0].finish_reason is FinishReason.LENGTH for id in waiting)


def test_nobody_streams_and_steps_are_full() -> None:
    engine = _engine()
    for id, _ in list(engine.clients):
        engine.abort(id)
    engine.run(3)
    first = len(engine.plans)
    engine.accept(_prompt(1000, 1), 1)
    engine.run(20)
    assert [plan.rows[0].count for plan in engine.plans[first:]] == [256, 256, 256, 232]

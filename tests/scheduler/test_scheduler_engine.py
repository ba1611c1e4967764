"""Tests what an engine says in the log about its requests, by the ids that their clients see."""

import logging

import pytest
from msgspec.structs import replace

from services.scheduler.config import SchedulerConfig
from services.scheduler.engine import Engine
from shared.protocol import SampledRow, StepResult, Submit, Suspicion
from tests.scheduler.examples import REGISTER, submit


def named(request: Submit, request_id: str) -> Submit:
    return replace(request, request_id=request_id)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, list[str]]]:
    """Return level, message and requests of each record."""
    records = [(record, vars(record)) for record in caplog.records]
    return [
        (record.levelname, record.message, fields.get("request_ids") or [fields["request_id"]])
        for record, fields in records
    ]


@pytest.fixture
def engine() -> Engine:
    engine = Engine(SchedulerConfig(), REGISTER)
    engine.configure(REGISTER)
    return engine


def test_a_lost_worker_names_those_that_were_running(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Who waits is not named."""
    for n, losses in ((1, 2), (2, 2)):
        engine.submit(named(submit(n, n=n), "ab"[n - 1]), 1.0)
        for _ in range(losses):
            assert engine.plan(1.0) is not None
            engine.submit(named(submit(9), "waits"), 1.0)
            engine.lose_worker(1.0)
            engine.abort(9)
            engine.configure(REGISTER)
    assert said(caplog) == [
        ("WARNING", "the worker was lost with 1 suspects", ["a"]),
        ("WARNING", "the worker was lost with 1 suspects", ["a"]),
        ("ERROR", "a request is ended: the worker died 2 times while it ran this request alone", ["a"]),
        ("WARNING", "the worker was lost with 2 suspects", ["b"]),
        ("WARNING", "the worker was lost with 1 suspects", ["b"]),
    ]


def test_a_suspect_that_comes_is_named(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.submit(replace(submit(1), request_id="a", suspicion=Suspicion(3, 1, 2, 3)), 1.0)
    message = "a request comes as a suspect; deaths alone so far: 1"
    assert said(caplog) == [("WARNING", message, ["a"])]


def test_debug_tells_of_refusals_and_of_who_runs(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine.submit(named(submit(1, max_tokens=5000), "long"), 1.0)
    engine.submit(named(submit(2), "a"), 1.0)
    plan = engine.plan(3.5)
    assert plan is not None
    engine.commit(StepResult(plan.epoch, plan.step, [SampledRow(0, [7])]))
    refused, runs = said(caplog)
    assert (refused[0], refused[2]) == ("DEBUG", ["long"])
    assert refused[1].startswith("a request is refused: 3 tokens of prompt and 5000 of output are more than ")
    assert runs == ("DEBUG", "sample 0 runs, after 2.500 s in the queue and 0 preemptions", ["a"])

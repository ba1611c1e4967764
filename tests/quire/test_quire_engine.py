"""The offline engine keeps a GPU's next plan ready, gives a CPU one plan at a time, and never shortens a step."""

import os
import subprocess
import sys

import msgspec
import pytest

from quire.engine import InProcessEngine
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from services.worker.interface import WorkerInfo
from shared.protocol import Sampling, StepPlan, StepResult, Submit, pack_tokens
from tests.scripted_worker import FinishedStep, Script, ScriptedRunner


class LoggingRunner(ScriptedRunner):
    """Notes when a step is launched and when its result is asked for."""

    def __init__(self, device: str) -> None:
        super().__init__(Script())
        self.device = device
        self.calls: list[tuple[str, int]] = []

    @property
    def info(self) -> WorkerInfo:
        return msgspec.structs.replace(super().info, device=self.device)

    def launch(self, plan: StepPlan) -> FinishedStep:
        self.calls.append(("launch", plan.step))
        step, calls = super().launch(plan), self.calls

        class Step(FinishedStep):
            def result(self) -> StepResult:
                calls.append(("result", plan.step))
                return super().result()

        return Step(step.result())


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", [("launch", 0), ("result", 0), ("launch", 1), ("result", 1), ("launch", 2), ("result", 2)]),
        ("cuda:0", [("launch", 0), ("launch", 1), ("result", 0), ("launch", 2), ("result", 1), ("result", 2)]),
    ],
)
def test_plans_in_flight(device: str, expected: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = LoggingRunner(device)
    monkeypatch.setattr("quire.engine.start_runner", lambda config: runner)
    engine = InProcessEngine(SchedulerConfig(), WorkerConfig())
    engine.submit(Submit(0, pack_tokens([1, 2, 3]), 3, Sampling(max_tokens=3, seed=0)))
    rows = []
    while engine.engine.unfinished:
        rows += engine.step()
    assert sum(len(row.tokens) for row in rows) == 3
    assert runner.calls == expected


@pytest.mark.parametrize(("requested", "seconds"), [(None, 0.0), (50, 0.05)])
def test_steps_may_take_any_time_since_nobody_reads_along(
    requested: float | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.start_runner", lambda config: LoggingRunner("cpu"))
    engine = InProcessEngine(SchedulerConfig(max_step_ms=requested), WorkerConfig())
    assert engine.limits.max_step_seconds == seconds


def test_an_engine_that_is_reset_forgets_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = LoggingRunner("cuda:0")
    monkeypatch.setattr("quire.engine.start_runner", lambda config: runner)
    engine = InProcessEngine(SchedulerConfig(), WorkerConfig())
    for id in range(2):
        engine.submit(Submit(id, pack_tokens([1, 2, 3]), 3, Sampling(max_tokens=3, seed=0)))
        engine.step()
        engine.reset([id])
    assert not engine.engine.unfinished


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (("-m", "services.worker", "--model=/nowhere"), 10_000),
        (("-c", "import services.worker, quire.llm"), 300_000),
    ],
)
def test_only_in_a_workers_process_do_compute_threads_soon_sleep(arguments: tuple[str, ...], count: int) -> None:
    """libgomp itself says what it goes by, as torch is loaded. 300,000 is its default."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert f"GOMP_SPINCOUNT = '{count}'" in done.stderr

"""When a step is done, and what it took, with events in place of CUDA's."""

import pytest
import torch

from services.worker.launched_step import LaunchedStep, StepOutputs, StepTimer
from shared.protocol import Epoch, StepPlan, StepResult

PLAN = StepPlan(Epoch("test", 1), 4, [])


class FakeEvent:
    """An event that the device passes when the test says so."""

    recorded: list["FakeEvent"]

    def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing
        assert blocking
        self.waited = self.passed = False

    def record(self) -> None:
        FakeEvent.recorded.append(self)

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.waited, "CUDA raises if an event has not passed"
        return 1500.0


def test_a_step_without_output_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.recorded = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    step = LaunchedStep(PLAN, StepOutputs(), StepTimer(torch.device("cuda")))
    assert not step.is_done
    _, end = FakeEvent.recorded
    end.passed = True
    assert step.is_done
    assert step.result() == StepResult(PLAN.epoch, 4, [], 1.5)


def test_a_step_on_a_cpu_is_done_when_it_was_launched() -> None:
    step = LaunchedStep(PLAN, StepOutputs([3], torch.tensor([7])), StepTimer(torch.device("cpu")))
    assert step.is_done
    result = step.result()
    assert [(row.slot, row.tokens) for row in result.rows] == [(3, [7])]
    assert 0 < result.seconds < 10

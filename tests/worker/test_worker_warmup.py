"""Tests how a worker measures the costs of a step, on a runner whose steps take what they are said to."""

from typing import NamedTuple

import pytest
import torch

from services.worker.interface import WorkerInfo
from services.worker.models.causal_lm import ModelShape
from services.worker.warmup import warm_up
from shared.protocol import Configure, StepPlan, StepResult

SHAPE = ModelShape(architecture="Llama", num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=100, max_positions=1000)


class Done(NamedTuple):
    """A step that is done."""

    seconds: float
    plan: StepPlan
    is_done: bool = True

    def result(self) -> StepResult:
        return StepResult(self.plan.epoch, self.plan.step, [], self.seconds)


class TimedRunner:
    """Takes `step` seconds for any step, and `token` more for each token; twice as long in every second step."""

    def __init__(self, step: float, token: float) -> None:
        self.counts: list[int] = []  # tokens of each step
        self._step, self._token = step, token

    @property
    def info(self) -> WorkerInfo:
        raise NotImplementedError("nothing asks for it")

    def configure(self, message: Configure) -> None:
        pass

    def launch(self, plan: StepPlan) -> Done:
        self.counts.append(sum(row.count for row in plan.rows))
        seconds = self._step + self.counts[-1] * self._token
        return Done(seconds * (1 + len(self.counts) % 2), plan)


def test_the_best_of_a_few_steps_counts() -> None:
    runner = TimedRunner(0.01, 0.001)
    measured = warm_up(runner, SHAPE, torch.device("cpu"))
    assert measured == pytest.approx((0.01, 0.001))
    assert runner.counts == [128] * 4 + [1] * 3


def test_a_large_model_is_measured_once() -> None:
    runner = TimedRunner(0.5, 0.02)
    measured = warm_up(runner, SHAPE, torch.device("cpu"))
    assert measured == pytest.approx((0.5, 0.02), rel=0.02)
    assert runner.counts == [128, 128, 1, 1, 1]

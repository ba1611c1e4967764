"""Tests how often the steps run that measure a worker's speed."""

from typing import Any, NamedTuple, cast

import pytest
import torch

from services.worker.interface import Runner
from services.worker.models.causal_lm import ModelShape
from services.worker.warmup import warm_up
from shared.protocol import StepPlan

SHAPE = ModelShape(architecture="x", vocab_size=100, max_positions=1000, num_layers=1, num_kv_heads=1, head_dim=16)


class Result(NamedTuple):
    seconds: float


class Launched(NamedTuple):
    seconds: float

    def result(self) -> Result:
        return Result(self.seconds)


class ScriptedRunner:
    """Says that a step takes some seconds, and more for each token."""

    def __init__(self, step: float, token: float) -> None:
        self._step, self._token = step, token
        self.counts: list[int] = []

    def configure(self, sizes: Any) -> None: ...

    def launch(self, plan: StepPlan) -> Launched:
        count = plan.rows[0].count
        noise = 1 + 0.1 * (len(self.counts) % 2)  # every other step takes longer
        self.counts.append(count)
        return Launched((self._step + self._token * count) * noise)


@pytest.mark.parametrize(
    ("token", "prefills", "decodes"), [(1e-3, 4, 3), (3e-3, 3, 3), (1e-2, 2, 3)], ids=["fast", "slower", "slow"]
)
def test_long_steps_are_measured_less_often(token: float, prefills: int, decodes: int) -> None:
    """The first step is not measured."""
    runner = ScriptedRunner(0.01, token)
    measured = warm_up(cast(Runner, runner), SHAPE, torch.device("cpu"))
    assert runner.counts == [128] * prefills + [1] * decodes
    assert measured.token_seconds == pytest.approx(token, rel=0.15)

"""`LaunchedStep`: a step that the device computes, and how its result is read when it is done."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.worker.logprobs import LogprobRows
from services.worker.transfers import HostCopy
from shared.protocol import SampledRow, StepPlan, StepResult, TokenLogprobs


@dataclass
class StepOutputs:
    """The results of a step, on the device."""

    slots: Sequence[int] = ()  # (N,): whose tokens were sampled
    tokens: Tensor | None = None  # (N,) int64
    sampled: LogprobRows | None = None  # log-probabilities of sampled tokens
    prompts: list[LogprobRows] = field(default_factory=list)  # log-probabilities of prompt tokens

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the order in which `LaunchedStep` reads them."""
        groups = [self.sampled] if self.sampled else []
        columns = [column for group in groups + self.prompts for column in group.columns]
        return columns if self.tokens is None else [self.tokens, *columns]


class StepTimer:
    """Measures the time that a step takes on its device: from the timer's creation to `stop`, both in its order."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._began = time.perf_counter()
        self._record()

    def stop(self) -> None:
        self._record()
        self._seconds = time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        """The time; on a GPU only after the step is done."""
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._is_cuda else self._seconds

    def _record(self) -> None:
        if self._is_cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._events[-1].record()


class LaunchedStep:
    """A step of which all was launched."""

    def __init__(self, plan: StepPlan, outputs: StepOutputs, timer: StepTimer) -> None:
        self._epoch, self._step = plan.epoch, plan.step
        self._outputs, self._timer = outputs, timer
        self._copy = HostCopy(outputs.tensors)
        timer.stop()

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._copy.is_done

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        return StepResult(epoch=self._epoch, step=self._step, rows=self._rows(), seconds=self._timer.seconds)

    def _rows(self) -> list[SampledRow]:
        outputs, tensors = self._outputs, iter(self._copy.wait())
        tokens = [] if outputs.tokens is None else next(tensors).tolist()
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        if outputs.sampled:
            _add_entries(logprobs, outputs.sampled, [next(tensors) for _ in outputs.sampled.columns])
        for group in outputs.prompts:
            _add_entries(prompts, group, [next(tensors) for _ in group.columns])
        rows = [
            SampledRow(slot, [token], logprobs.get(slot), prompts.pop(slot, None))
            for slot, token in zip(outputs.slots, tokens, strict=True)
        ]
        return rows + [SampledRow(slot, [], None, entries) for slot, entries in prompts.items()]


def _add_entries(by_slot: dict[int, list[TokenLogprobs]], group: LogprobRows, columns: Sequence[Tensor]) -> None:
    for slot, entry in group.entries(columns):
        by_slot.setdefault(slot, []).append(entry)

"""`LaunchedStep`: a step that the device computes, and how its result is read when it is done.

A `DeferredStep` is computed only when its result is wanted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    errors: dict[int, str] = field(default_factory=dict)  # by slot: why its sequence cannot go on
    sampled: list[LogprobRows] = field(default_factory=list)  # log-probabilities of sampled tokens
    prompts: list[LogprobRows] = field(default_factory=list)  # log-probabilities of prompt tokens

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the order in which `LaunchedStep` reads them."""
        columns = [column for group in self.sampled + self.prompts for column in group.columns]
        return columns if self.tokens is None else [self.tokens, *columns]


class StepTimer:
    """Tells when the device has finished a step, and how long it took: all that is launched before `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[Any] = []  # CUDA's: the beginning and the end
        self._began = time.perf_counter()
        self._seconds = 0.0
        self._record()

    def stop(self) -> None:
        """Note the end of the step, in the device's order."""
        self._record()
        self._seconds = time.perf_counter() - self._began

    @property
    def is_done(self) -> bool:
        return not self._is_cuda or bool(self._events[-1].query())

    def wait(self) -> float:
        """Wait for the end of the step. Return the seconds that it took."""
        if not self._is_cuda:
            return self._seconds
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _record(self) -> None:
        if self._is_cuda:
            # A wait that spins would keep a core from other work.
            self._events.append(torch.cuda.Event(enable_timing=True, blocking=True))  # type: ignore[no-untyped-call]
            self._events[-1].record()


class LaunchedStep:
    """A step of which all was launched. With `reports` unset, its result has no rows: another rank's has them."""

    def __init__(self, plan: StepPlan, outputs: StepOutputs, timer: StepTimer, *, reports: bool = True) -> None:
        self._epoch, self._step = plan.epoch, plan.step
        self._outputs, self._timer, self._reports = outputs, timer, reports
        self._copy = HostCopy(outputs.tensors)
        timer.stop()

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._timer.is_done

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        seconds = self._timer.wait()
        rows = self._rows() if self._reports else []
        return StepResult(epoch=self._epoch, step=self._step, rows=rows, seconds=seconds)

    def sampled_tokens(self) -> list[int]:
        """Wait for the step, and return the tokens of `StepOutputs.slots`."""
        self._timer.wait()
        tokens: list[int] = [] if self._outputs.tokens is None else self._copy.result()[0].tolist()
        return tokens

    def _rows(self) -> list[SampledRow]:
        outputs, tensors = self._outputs, iter(self._copy.result())
        tokens = [] if outputs.tokens is None else next(tensors).tolist()
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        for group in outputs.sampled:
            _add_entries(logprobs, group, [next(tensors) for _ in group.columns])
        for group in outputs.prompts:
            _add_entries(prompts, group, [next(tensors) for _ in group.columns])
        rows = [
            SampledRow(slot, [token], logprobs.get(slot), prompts.pop(slot, None), outputs.errors.get(slot, ""))
            for slot, token in zip(outputs.slots, tokens, strict=True)
        ]
        return rows + [SampledRow(slot, [], None, entries) for slot, entries in prompts.items()]


def _add_entries(by_slot: dict[int, list[TokenLogprobs]], group: LogprobRows, columns: Sequence[Tensor]) -> None:
    for slot, entry in group.entries(columns):
        by_slot.setdefault(slot, []).append(entry)


class DeferredStep:
    """A step that `launch` launches once its result is wanted, in the thread that wants it.

    On a CPU, a rank that exchanges something with others waits for them in the midst of a step.
    """

    is_done = False

    def __init__(self, launch: Callable[[], LaunchedStep]) -> None:
        self._launch = launch

    def result(self) -> StepResult:
        """Compute the step and return its result."""
        return self._launch().result()

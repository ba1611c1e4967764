"""Measures what a step costs the worker around the model, whose forward pass and head return ready-made tensors.

    python -m benchmarks.around_the_model [--rows 1,8,32,64] [--threads 1] [--steps 300]

Prints the microseconds of the fastest step, and of each of its parts.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.worker_threads import MODES, decode
from services.worker import runner as running
from services.worker.config import WorkerConfig
from services.worker.models.causal_lm import Inputs, ModelShape
from services.worker.sampler import Sampler
from services.worker.sequence_states import SequenceStates, StateChanges
from services.worker.start import start_runner

CONTEXT = 192
PARTS = (
    (SequenceStates, "stage"),
    (StateChanges, "apply"),
    (running, "build_batch"),
    (running, "prepare_inputs"),
    (running, "prompt_logprobs"),
    (running, "build_sampling_batch"),
    (Sampler, "stage"),
    (Sampler, "sample"),
    (SequenceStates, "store_tokens"),
    (running, "stage_logprobs"),
)


class Ready:
    """A model that returns ready-made tensors."""

    def __init__(self, shape: ModelShape, rows: int) -> None:
        self.shape = shape
        self._hidden = torch.zeros(rows, 576)
        self._logits = torch.randn(rows, shape.vocab_size)

    def prepare_positions(self, length: int) -> None:
        pass

    def forward(self, inputs: Inputs, caches: object) -> Tensor:
        return self._hidden[: len(inputs.tokens)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    sizes = [int(size) for size in options.rows.split(",")]
    runner = start_runner(WorkerConfig(num_threads=options.threads))
    runner._model = Ready(runner._model.shape, max(CONTEXT, *sizes))
    seconds_by_part: dict[str, list[float]] = defaultdict(list)
    whole = {size: min(decode(runner, size, CONTEXT, options.steps, MODES["greedy"])) for size in sizes}
    for owner, name in PARTS:
        setattr(owner, name, timed(getattr(owner, name), seconds_by_part[title(owner, name)]))
    parts: dict[str, list[float]] = {title(*part): [] for part in PARTS}
    for size in sizes:
        decode(runner, size, CONTEXT, options.steps, MODES["greedy"])
        for name, values in parts.items():
            values.append(min(seconds_by_part[name]))
            seconds_by_part[name].clear()
    print(f"| µs, decode rows | {' | '.join(map(str, sizes))} |\n|{'---|' * (len(sizes) + 1)}")
    for name, seconds in {"all": list(whole.values()), **parts}.items():
        print(f"| {name} | {' | '.join(f'{1e6 * value:.0f}' for value in seconds)} |")


def title(owner: Any, name: str) -> str:
    return name if owner is running else f"{owner.__name__}.{name}"


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return `call`, which appends the seconds it took to a list."""

    def noting(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            seconds.append(time.perf_counter() - began)

    return noting


if __name__ == "__main__":
    main()

"""Measures what adapters (LoRA) cost the worker: streams that use 1, 4 and 16 of them beside as many that use none.

    python -m benchmarks.lora [--streams 32] [--adapters 0,1,4,16] [--rank 16] [--context 128] [--steps 40]

All cases are sequences of one process and take turns, step by step; adapters are random, and change every linear
module. Contexts are empty memory of KV, which takes as long as a full one. The last columns are of prompts of
`--prefill` tokens. It measures the embedded model, without a scheduler.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from benchmarks.worker_threads import EPOCH, MODES, begin, sequence
from services.worker.config import WorkerConfig
from services.worker.models.adapters.peft_folder import A_SUFFIX, B_SUFFIX, PREFIX
from services.worker.models.adapters.targets import LoraTargets, find_targets
from services.worker.models.registry import load_family, read_supported
from services.worker.runner import ModelRunner
from services.worker.start import start_runner
from shared.hub.checkpoint import locate
from shared.protocol import NewSequence, Row, StepPlan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--adapters", default="0,1,4,16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    cases = [int(count) for count in options.adapters.split(",")]
    config = WorkerConfig(
        num_threads=options.threads,
        quantization=options.quantization,
        dtype=options.dtype,
        enable_lora=True,
        max_loras=max(cases),
        max_lora_rank=options.rank,
    )
    runner = start_runner(config)
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), options.rank)
        bench = Benchmark(runner, folder, cases, options)
        print("| adapters | decode, ms a step | cost | prompt, ms | cost |\n|---|---|---|---|---|")
        decodes, prompts = bench.decodes(), bench.prompts()
    for count, decode, prompt in zip(cases, decodes, prompts, strict=True):
        costs = [f"{100 * (time / first - 1):+.1f}%" for time, first in ((decode, decodes[0]), (prompt, prompts[0]))]
        print(f"| {count or 'none'} | {decode:.2f} | {costs[0]} | {prompt:.1f} | {costs[1]} |")


class Benchmark:
    """A runner with as many sequences for each case as there are streams; those of case c use its adapters in turn."""

    def __init__(self, runner: ModelRunner, adapter: str, cases: Sequence[int], options: argparse.Namespace) -> None:
        self._runner, self._cases, self._options = runner, cases, options
        self._step = 0
        length = max(options.context + options.steps, options.prefill)
        begin(runner, len(cases) * options.streams, length)
        for number in range(max(cases)):  # each has memory of its own
            runner.load_adapter(number, adapter)
        sequences = [self._sequence(slot, length) for slot in range(len(cases) * options.streams)]
        self._execute([], sequences, [(number, number) for number in range(max(cases))])

    def decodes(self) -> list[float]:
        """Return the median milliseconds of a step of all streams of each case."""
        times: list[list[float]] = [[] for _ in self._cases]
        for step in range(self._options.steps):
            for case, seconds in enumerate(times):
                rows = [Row(slot, self._options.context + step, 1, 1) for slot in self._slots(case)]
                seconds.append(self._execute(rows))
        return [1e3 * statistics.median(seconds) for seconds in times]

    def prompts(self) -> list[float]:
        """Return the median milliseconds of a whole prompt of one sequence of each case."""
        times: list[list[float]] = [[] for _ in self._cases]
        for _ in range(max(3, self._options.steps // 8)):
            for case, seconds in enumerate(times):
                seconds.append(self._execute([Row(self._slots(case)[0], 0, self._options.prefill, 1)]))
        return [1e3 * statistics.median(seconds) for seconds in times]

    def _slots(self, case: int) -> range:
        return range(case * self._options.streams, (case + 1) * self._options.streams)

    def _sequence(self, slot: int, length: int) -> NewSequence:
        count = self._cases[slot // self._options.streams]
        plain = sequence(slot, len(self._cases) * self._options.streams, length, length, MODES["greedy"])
        return replace(plain, adapter_slot=slot % count if count else -1)

    def _execute(
        self, rows: list[Row], new: Sequence[NewSequence] = (), adapters: Sequence[tuple[int, int]] = ()
    ) -> float:
        self._step += 1
        plan = StepPlan(EPOCH, self._step, rows, new_sequences=list(new), adapter_slots=list(adapters))
        return self._runner.execute(plan).seconds


def write_adapter(folder: Path, rank: int) -> None:
    """Write a random adapter of the embedded model."""
    targets, generator = embedded_targets(), torch.Generator().manual_seed(0)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, target in targets.modules.items():
        module = f"{PREFIX}{targets.prefixes[0]}{name}"
        tensors[module + A_SUFFIX] = torch.randn(rank, target.inputs, generator=generator) * 0.02
        tensors[module + B_SUFFIX] = torch.randn(target.outputs, rank, generator=generator) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")


def embedded_targets() -> LoraTargets:
    folder, implementation = read_supported(locate(WorkerConfig().model))
    family = load_family(implementation.architecture)
    return find_targets(family.read_spec(folder.config), family.names)


if __name__ == "__main__":
    main()

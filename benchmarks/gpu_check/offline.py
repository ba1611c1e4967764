"""Runs the whole engine in this process: starts it on random weights, and drives it with random prompts."""

import gc
import itertools
import json
import logging
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.gpu_check.settings import Config, Settings
from quire.engine import InProcessEngine
from services.scheduler.config import SchedulerConfig
from services.worker import start
from services.worker.config import WorkerConfig
from shared.config import resolve
from shared.protocol import ProgressRow, Sampling, Submit, TokenLogprobs, pack_tokens

MAX_STEPS = 100_000


class Output(NamedTuple):
    """What the engine has generated for one prompt."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


class Started(NamedTuple):
    """An engine, the seconds of its start by phase, and what it logs."""

    engine: InProcessEngine
    phases: dict[str, float]
    log: "LogLines"
    lines_of_start: int  # how many of the log's lines the start has written

    @property
    def has_graphs(self) -> bool:
        return any(text.startswith("captured ") for text in self.log.lines)


class LogLines(logging.Handler):
    """Keeps the lines of the services' log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def started_engine(settings: Settings, **options: Any) -> Iterator[Started]:
    """Start an engine of the settings' model with random weights, after the memory of a former one was freed.

    `options` are settings of the server. The prefix index is off, so that prompts may repeat.
    """
    free_memory(settings)
    log, logger = LogLines(), logging.getLogger("services")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder, _timed_phases() as phases:
            _write_config(Path(folder), settings.config)
            arguments = {
                "model": folder,
                "load_format": "dummy",
                "device": settings.device,
                "dtype": settings.dtype,
                "enable_prefix_caching": False,
                **options,
            }
            engine = InProcessEngine(resolve(SchedulerConfig, arguments, {}), resolve(WorkerConfig, arguments, {}))
        phases["memory, kernels and graphs"] = time.perf_counter() - began - sum(phases.values())
        yield Started(engine, phases, log, len(log.lines))
    finally:
        logger.removeHandler(log)


@contextmanager
def _timed_phases() -> Iterator[dict[str, float]]:
    """Measure the phases that `start_runner` calls."""
    phases: dict[str, float] = {}

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                phases[name] = time.perf_counter() - began

        return call

    with (
        patch.object(start, "load_model", timed("random weights", start.load_model)),
        patch.object(start, "ModelRunner", timed("warming up and measuring", start.ModelRunner)),
    ):
        yield phases


def _write_config(folder: Path, config: Config) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def free_memory(settings: Settings) -> None:
    """Give a GPU's unused memory back."""
    gc.collect()
    if settings.is_gpu:
        torch.cuda.empty_cache()


class Driver:
    """Submits prompts to an engine, and collects what comes back."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.engine = engine
        self._ids = itertools.count()

    def submit(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[int]:
        """Queue greedy requests that end with `max_tokens` alone, and return their ids."""
        ids = []
        for prompt in prompts:
            id = next(self._ids)
            params = Sampling(**({"seed": id, "temperature": 0.0} | sampling))
            self.engine.submit(Submit(id, pack_tokens(prompt), len(prompt), params))
            ids.append(id)
        return ids

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Output]:
        """Run the prompts side by side to their end, with the log-probabilities of two tokens each."""
        ids = self.submit(prompts, logprobs=2, **sampling)
        outputs = {id: Output([], []) for id in ids}
        self._run(len(ids), lambda row: _extend(outputs[row.id], row))
        return [outputs[id] for id in ids]

    def finish(self, count: int) -> None:
        """Run until `count` requests have ended."""
        self._run(count, lambda row: None)

    def _run(self, count: int, take: Any) -> None:
        for _ in range(MAX_STEPS):
            for row in self.engine.step():
                take(row)
                count -= row.finish_reason is not None
            if not count:
                return
        raise RuntimeError(f"{count} requests have not ended after {MAX_STEPS} steps")


def _extend(output: Output, row: ProgressRow) -> None:
    output.tokens.extend(row.tokens)
    output.logprobs.extend(row.logprobs or ())


def random_prompts(config: Config, lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Return prompts of these lengths."""
    generator = random.Random(seed)
    return [[generator.randrange(config["vocab_size"]) for _ in range(length)] for length in lengths]


class Decodes(NamedTuple):
    """Some steps in which a batch decodes."""

    tokens_per_second: float
    mean_context: float  # tokens


@contextmanager
def running_decodes(driver: Driver, prompts: Sequence[Sequence[int]], steps: int) -> Iterator[None]:
    """Let the prompts decode side by side in the block, which may run `steps` steps; then forget them."""
    budget = driver.engine.limits.max_num_batched_tokens
    prefills = 2 * (1 + sum(map(len, prompts)) // budget)  # while the last prompts are computed, the first ones decode
    room = driver.engine.limits.max_model_len - max(map(len, prompts))
    max_tokens = min(prefills + steps + 8, room)
    ids = driver.submit(prompts, max_tokens=max_tokens)
    waiting = set(ids)
    while waiting:
        for row in driver.engine.step():
            if row.finish_reason:
                raise RuntimeError(f"{len(waiting)} prompts waited while others ended: the batch does not fit")
            waiting.discard(row.id)
    try:
        yield
    finally:
        driver.engine.reset(ids)


def measure_decodes(driver: Driver, prompts: Sequence[Sequence[int]], steps: int) -> Decodes:
    """Measure `steps` steps of a batch that decodes, by the clock on the wall."""
    with running_decodes(driver, prompts, steps + 2):
        for _ in range(2):  # of which the first may have been planned with a prompt
            driver.engine.step()
        began, positions = time.perf_counter(), []
        for _ in range(steps):
            rows = driver.engine.step()
            if len(rows) != len(prompts):
                raise RuntimeError(f"a step had {len(rows)} rows, not {len(prompts)}")
            positions += [row.position for row in rows]
        seconds = time.perf_counter() - began
    context = sum(map(len, prompts)) / len(prompts) + sum(positions) / len(positions)
    return Decodes(len(positions) / seconds, context)

"""Tests `python -m services.worker` that starts all ranks of its engine: a real model, a scheduler, and Gloo."""

import asyncio
import json
import signal
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from services.gateway.backend import Backend
from shared.hub.checkpoint import locate
from shared.protocol import Sampling
from tests.system.processes import Child, Engine, complete, engine, snapshot
from tests.waiting import until

STARTING = 200.0  # seconds: several processes import torch
PROMPTS = [[7, 100 + number, 9] for number in range(4)]
TOKENS = 500


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a tiny model without weights, with the embedded one's tokenizer."""
    embedded = locate("")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(embedded / name)
    config = json.loads((embedded / "config.json").read_text())
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    config |= {"hidden_size": 64, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def worker(engine: Engine, folder: Path, size: int) -> Child:
    """Return a worker process of the engine with so many ranks, that is not started yet."""
    argv = ["-m", "services.worker", f"--model={folder}", "--load-format=dummy", f"--tensor-parallel-size={size}"]
    argv += [f"--scheduler={engine.workers}", "--device=cpu", "--dtype=float32", "--num-threads=1"]
    return Child("worker", engine.folder, [*argv, "--kv-cache-memory=0.01", "--swap-space=0"])


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Child, Backend]]:
    async with engine(worker=False) as behind, Backend([behind.address]) as backend:
        group = worker(behind, folder, 2)
        try:
            await group.start()
            await until(backend.ready, STARTING)
            yield group, backend
        finally:
            await group.stop()


async def run(backend: Backend) -> list[list[int]]:
    outputs = await asyncio.gather(*(complete(backend, prompt, TOKENS) for prompt in PROMPTS))
    assert {len(output.tokens) for output in outputs} == {TOKENS}
    return [output.tokens for output in outputs]


async def begin(backend: Backend) -> "asyncio.Task[list[list[int]]]":
    """Start the requests, and return as soon as there is an output: some steps of hundreds are done."""
    running = asyncio.create_task(run(backend))
    async with backend.submit(array("i", PROMPTS[0]), Sampling(max_tokens=TOKENS, seed=0)) as first:
        await first.rows()
    assert not running.done()
    return running


async def test_streams_outlive_a_rank_with_which_the_whole_worker_ends(folder: Path) -> None:
    async with serving(folder) as (group, backend):
        undisturbed = await run(backend)
        for number in (0, 1):
            ranks = psutil.Process(group.pid).children()
            assert len(ranks) == 2
            running = await begin(backend)
            ranks[number].kill()
            await until(lambda number=number: group.lives == number + 2, STARTING)
            assert await running == undisturbed
            assert group.status == 128 + signal.SIGKILL
            assert not any(rank.is_running() for rank in ranks)
        await until(lambda: snapshot(backend).worker_losses == 2)


async def test_a_worker_that_is_told_to_end_takes_all_ranks_along_in_good_order(folder: Path) -> None:
    async with serving(folder) as (group, backend):
        ranks = psutil.Process(group.pid).children()
        running = await begin(backend)
        group.signal(signal.SIGTERM)
        await running
        await until(lambda: group.lives == 2, STARTING)  # the streams may end before the processes do
        assert group.status == 0
        assert not any(rank.is_running() for rank in ranks)
        assert snapshot(backend).worker_losses == 0


async def test_a_model_that_cannot_be_divided_ends_the_worker_with_a_line(folder: Path) -> None:
    async with engine(worker=False) as behind:
        group = worker(behind, folder, 3)
        group.restart = False
        try:
            await group.start()
            await until(lambda: not group.running, STARTING)
            assert await group.ended() == 2
            assert "attention heads, 4, cannot be divided by it" in group.log
        finally:
            await group.stop()

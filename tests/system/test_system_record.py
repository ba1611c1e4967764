"""Tests the flight recorder with real processes: a replay makes the plans that they made until they were killed."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from services.scheduler.record import read_record
from tests.scripted_worker import CHAIN
from tests.scripted_worker import expected_chain as expected
from tests.system.processes import ROOT, complete, rest, serving, snapshot
from tests.system.test_system_processes import refusal
from tests.waiting import until

TOKENS = 200


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def replay(path: Path, *flags: str) -> list[str]:
    """Return what `quire replay` prints; it must succeed."""
    argv = ["-m", "quire", "replay", str(path), *flags]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=ROOT, stdout=-1, stderr=-1)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode().splitlines()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)])
async def test_a_killed_worker_is_in_the_record_of_a_scheduler_that_ends_in_order(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    flags = (f"--record={tmp_path}", "--max-num-seqs=4")
    async with serving(None, *flags, sizes=sizes) as (system, backend):
        prompts = [[CHAIN, 10 + at] for at in range(8)]
        async with asyncio.TaskGroup() as tasks:
            with system.slowed():
                running = [tasks.create_task(complete(backend, prompt, TOKENS)) for prompt in prompts]
                await until(lambda: snapshot(backend).generation_tokens > 20)
                system.worker.signal(signal.SIGKILL)
                await until(lambda: snapshot(backend).worker_losses == 1)
        assert [task.result().tokens for task in running] == [expected(prompt, TOKENS) for prompt in prompts]
        steps = (await rest(backend)).steps
        for child in (system.scheduler, *system.ranks):
            child.restart = False
        system.scheduler.signal(signal.SIGTERM)
        assert await system.scheduler.ended() == 0
    (path,) = files(tmp_path)
    printed = await replay(path, f"--trace={tmp_path}/trace.json")
    assert "worker losses: 1" in printed
    assert f"tokens generated: {8 * TOKENS}" in printed
    assert "requests: 8 submitted, 0 refused, 0 unfinished at the end" in printed
    assert printed[-1] == "the state at the end is the recorded one"
    assert int(printed[1].split()[6]) >= steps  # the plans, those that were lost included
    assert (tmp_path / "trace.json").stat().st_size > 0
    lost = [line for line in await replay(path, "--request=0") if " lost " in line]
    assert any("with the worker" in line for line in lost)


async def test_a_killed_scheduler_leaves_a_record_and_the_next_one_begins_another(tmp_path: Path) -> None:
    async with serving(None, f"--record={tmp_path}") as (system, backend):
        with system.slowed():
            long = asyncio.create_task(complete(backend, [CHAIN, 5], TOKENS))
            await until(lambda: snapshot(backend).generation_tokens > 20)
            generated = snapshot(backend).generation_tokens
            await until(lambda: snapshot(backend).generation_tokens > generated + 10)  # half a second, five flushes
            system.scheduler.signal(signal.SIGKILL)
            await until(lambda: system.scheduler.lives == 2)
        assert (await long).tokens == expected([CHAIN, 5], TOKENS)
        system.scheduler.restart = False
        system.scheduler.signal(signal.SIGTERM)
        assert await system.scheduler.ended() == 0
    before, after = files(tmp_path)
    printed = await replay(before)
    assert "requests: 1 submitted, 0 refused, 1 unfinished at the end" in printed
    assert printed[-1] == "the state at the end is not recorded"
    (tokens,) = (int(line.split()[-1]) for line in printed if line.startswith("tokens generated"))
    assert tokens >= generated
    assert "resumed" in " ".join(await replay(after, "--request=0"))
    assert not read_record(after).head.continues


async def test_a_folder_that_cannot_be_written_to_is_one_line() -> None:
    line = await asyncio.to_thread(refusal, "services.scheduler", "--record=/dev/null/x")
    assert line == "scheduler: --record /dev/null/x: Not a directory"

"""`run_ranks`: all ranks of an engine on this machine, as processes that end together.

It is what `python -m services.worker` does if it is not told which rank it is. The process that calls it computes
nothing. It starts no rank again: without one the others cannot go on, so it ends with all of them, and whoever has
started it (a container engine, Kubernetes) starts it again.
"""

import asyncio
import logging
import os
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from contextlib import suppress

from services.worker.config import WorkerConfig
from services.worker.gpus import gpu_variables

logger = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that the other ranks have to end once one has. Those that wait for it fail at once, and the scheduler tells
all to stop.
"""


def run_ranks(config: WorkerConfig, argv: Sequence[str]) -> int:
    """Run a process with the arguments `argv` for each rank, until one ends. Return the exit status of that one.

    A signal to end is passed on, as often as it comes. Raise `ConfigError` if there are too few GPUs.
    """
    return asyncio.run(_run_ranks(config, argv))


async def _run_ranks(config: WorkerConfig, argv: Sequence[str]) -> int:
    size = config.parallel.world_size
    first, all_local = config.local_rank * size, config.local_world_size * size
    variables = gpu_variables(config.device, size, os.environ)
    with tempfile.TemporaryDirectory(prefix="quire-ranks-") as rendezvous:
        command = [sys.executable, "-m", "services.worker", *argv, f"--rendezvous={rendezvous}"]
        command += [f"--local-world-size={all_local}", f"--supervisor={os.getpid()}"]
        ranks = [
            await asyncio.create_subprocess_exec(
                *command,
                f"--rank={rank}",
                f"--local-rank={first + rank}",
                stdin=DEVNULL,
                env={**os.environ, **own},
            )
            for rank, own in enumerate(variables)
        ]
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, _signal, ranks, signal.SIGTERM)
        ends = {asyncio.ensure_future(process.wait()): rank for rank, process in enumerate(ranks)}
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # Several may be found to have ended: those that fail do so because of one that was killed.
        end = max(done, key=lambda end: (end.result() < 0, end.result() > 0))
        status = end.result()
        logger.info("rank %d of %d has ended with status %d; the others end too", ends[end], size, status)
        await asyncio.wait(ends, timeout=GRACE)
        _signal(ranks, signal.SIGKILL)
        await asyncio.wait(ends)
        return status if status >= 0 else 128 - status


def _signal(ranks: Sequence[Process], number: signal.Signals) -> None:
    for process in ranks:
        with suppress(ProcessLookupError):
            process.send_signal(number)

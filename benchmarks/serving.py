"""Runs servers to measure: `quire serve` with the embedded model, or its services with a worker that sleeps."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shared.hub.checkpoint import locate
from shared.hub.embedded import EMBEDDED
from tests.scripted_worker import Script
from tests.system.processes import engine, gateway

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = 2048


@asynccontextmanager
async def embedded(*flags: str) -> AsyncIterator[str]:
    """Run `quire serve` with the embedded model and these flags; yield its address once it is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire", "serve", "--host=127.0.0.1", "--port=0", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if match := re.search(r"at (http://\S+) \(ready", line.decode()):
                yield match[1]
                break
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def sleeping(step: float, *flags: str) -> AsyncIterator[str]:
    """Run the gateway, the scheduler with these flags, and a worker that takes `seconds` for any step.

    Its text is the embedded model's tokens, in order.
    """
    script = Script(vocab_size=49152, eos=2, blocks=20_000, max_positions=CONTEXT, delay=step)
    names = (f"--model={locate('')}", f"--served-model-name={EMBEDDED}")
    async with engine(script, *flags) as running, gateway(running, *names) as front:
        yield f"http://127.0.0.1:{front.port}"

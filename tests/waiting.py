"""Waits for conditions that another thread or process brings about: `until` in coroutines, `wait_until` elsewhere."""

import asyncio
import time
from collections.abc import Awaitable, Callable

PATIENCE = 20.0  # seconds; only failing tests reach it


async def until(holds: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = PATIENCE) -> None:
    """Wait until `holds()`. Raise TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while True:
            result = holds()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.01)


def wait_until(
    holds: Callable[[], bool], seconds: float = PATIENCE, describe: Callable[[], str] = lambda: "it still does not hold"
) -> None:
    """Block until `holds()`. Fail with the text of `describe()` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.01)

"""Waits for conditions that another thread or process brings about: `until` in coroutines, `wait_until` elsewhere.

A test that waits for something waits for it here, with the common patience, and does not assert how soon it comes: on a
machine that others use too, a process may stand still for seconds.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable

from shared.liveness import GRACE_PERIOD

PATIENCE = 100.0
"""Seconds, which only failing tests reach. On a busy machine a few processes may take half a minute to start, and what
is silent gets as much more (GRACE_PERIOD)."""


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


def found_dead(log: str, said: str, timeout: int, *, remote: bool = False) -> bool:
    """Return whether a log tells of a peer that was `said` ("silent", "busy with one step") for its timeout in seconds.

    A busy watcher may be late by two seconds. If it is short of CPU, it gives a peer GRACE_PERIOD more that it knows
    from heartbeats alone, as one that is `remote`.
    """
    seconds = [int(number) for number in re.findall(rf"{said} for (\d+)\.", log)]
    late = timeout + 2
    return any(timeout <= number <= late or (remote and number >= timeout + GRACE_PERIOD) for number in seconds)

"""Runs work that holds the interpreter in one thread: decoding bodies, rendering templates, encoding responses.

Python switches threads every five milliseconds. So with one such thread the loop waits at most that long, however much
work there is; with six it could wait six times as long. Work that releases the interpreter, such as tokenizing, does
not need this thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_executor = ThreadPoolExecutor(1, "gateway work")


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in the thread while the loop goes on. Return what it returns, or raise what it raises."""
    return await asyncio.get_running_loop().run_in_executor(_executor, lambda: function(*args, **kwargs))


async def run_in_thread_if(long: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in the thread if it takes `long`, or else directly: the thread costs 0.1 ms."""
    return await run_in_thread(function, *args, **kwargs) if long else function(*args, **kwargs)

"""One thread for work that holds the interpreter: decoding long bodies, rendering templates, making long responses.

Python switches threads every five milliseconds. So beside one such thread the loop waits no longer than that, however
much work there is; beside six it would wait for six. Work that releases the interpreter, such as tokenizing, has no
need of this thread.
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
    """Call `function` in the thread if it takes long, else at once: the thread costs a tenth of a millisecond."""
    return await run_in_thread(function, *args, **kwargs) if long else function(*args, **kwargs)

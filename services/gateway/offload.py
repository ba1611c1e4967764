"""One thread for work that holds the interpreter: decoding long bodies, rendering templates, making long answers.

Python lets threads take turns every five milliseconds, so beside one such thread the loop waits no longer than that,
however much there is to do; beside six it would wait for six. What lets go of the interpreter while it works, as the
tokenizer does, has no need of this.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_thread = ThreadPoolExecutor(1, "offload")


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `function` returns, or raise what it raises, while the loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_thread, lambda: function(*args, **kwargs))


async def off_loop_if(large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do the same if the work is large, else call `function` at once: a thread costs a tenth of a millisecond."""
    return await off_loop(function, *args, **kwargs) if large else function(*args, **kwargs)

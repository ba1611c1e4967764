"""Renders the chat template that a request brings (`--trust-request-chat-template`).

The server's own template is its operator's, and is tried when the server starts. One of a client may loop for ever, or
ask for a number or a text that fills the memory, and neither the sandbox nor a thread can stop that. So it runs in a
process of its own, which has limits of time and memory and none of the gateway's variables, and of which there are few
at a time. Starting it takes some 0.2 s, which only requests of this kind pay.
"""

import asyncio
import itertools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import InvalidRequest, Overloaded
from shared.text.template import ChatTemplate

FIELD = "chat_template"
MAX_SOURCE = 128 * 1024  # characters; the longest templates of models have a fifth of it
MAX_OUTPUT = 8 * 1024 * 1024  # characters
CPU_SECONDS = 3  # after which the kernel ends the process, even if nobody waits for it any more
TIMEOUT = 30.0  # seconds, for a machine that has no time for the process
MEMORY = 1024 * 1024 * 1024  # bytes of address space
TOO_MUCH_MEMORY = f"{FIELD} takes more than {MEMORY >> 20} MiB of memory"
MAX_ERROR = 1000  # characters of an error's text, which a template may make as long as it likes
MAX_PROCESSES = 2
RETRY_AFTER = 5.0  # seconds
MAX_WAITING = 64  # requests that wait for a process; more are refused, as their clients would wait for minutes
ENVIRONMENT = ("TZ",)  # variables of the gateway that a process gets; others may be keys

_executor = ThreadPoolExecutor(MAX_PROCESSES, "templates of requests")  # its threads wait for the processes
_rendering: set[int] = set()  # the numbers of jobs that run or wait
_numbers = itertools.count()


class _Job(Struct, frozen=True):
    """What a process is to render."""

    source: str
    template: dict[str, Any]  # arguments of `ChatTemplate`
    messages: list[Any]
    options: dict[str, Any]  # arguments of `ChatTemplate.render`
    max_characters: int


class _Result(Struct, frozen=True):
    """The text, or the error if there is one."""

    text: str = ""
    error: str = ""
    param: str | None = None


async def render_request_template(
    source: str, template: ChatTemplate, messages: Sequence[Any], *, max_characters: int, **options: Any
) -> str:
    """Return what `ChatTemplate.render` does with these `options`, by a template like the server's with `source`.

    Raise `InvalidRequest` if the template is wrong, takes too long or too much memory, or prints too much, and
    `Overloaded` if too many wait.
    """
    if len(source) > MAX_SOURCE:
        raise InvalidRequest(f"{FIELD} must hold at most {MAX_SOURCE} characters, got {len(source)}", FIELD)
    job = _Job(source, template.arguments, list(messages), options, min(max_characters, MAX_OUTPUT))
    if len(_rendering) >= MAX_PROCESSES + MAX_WAITING:
        raise Overloaded(f"{MAX_WAITING} requests wait for their {FIELD} to be rendered already", RETRY_AFTER)
    _rendering.add(number := next(_numbers))
    try:
        result = await asyncio.get_running_loop().run_in_executor(_executor, _run, job)
    finally:
        _rendering.discard(number)
    if result.error:
        raise InvalidRequest(result.error, result.param)
    return result.text


def _run(job: _Job) -> _Result:
    """Render in a new process."""
    kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    environment = kept | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(job), capture_output=True, timeout=TIMEOUT, env=environment
        )
    except subprocess.TimeoutExpired:
        return _Result(error=f"{FIELD} has not rendered the messages within {TIMEOUT:g} s", param=FIELD)
    if done.returncode == -signal.SIGXCPU:
        return _Result(error=f"{FIELD} takes more than {CPU_SECONDS} s to render the messages", param=FIELD)
    if done.returncode:
        return _Result(error=TOO_MUCH_MEMORY, param=FIELD)
    return msgspec.json.decode(done.stdout, type=_Result)


def _render(job: _Job) -> _Result:
    try:
        text = ChatTemplate(job.source, **job.template).render(job.messages, **job.options)
        text.encode()  # a template may write half of a surrogate pair
    except InvalidRequest as error:
        return _Result(error=error.message[:MAX_ERROR], param=error.param)
    except MemoryError:
        return _Result(error=TOO_MUCH_MEMORY, param=FIELD)
    except Exception as error:  # whatever a template can bring about is the template's fault
        return _Result(error=str(error)[:MAX_ERROR] or type(error).__name__, param=FIELD)
    if len(text) > job.max_characters:
        return _Result(
            error=f"{FIELD} must print at most {job.max_characters} characters, got {len(text)}", param=FIELD
        )
    return _Result(text)


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=_Job)
    sys.stdout.buffer.write(msgspec.json.encode(_render(job)))


if __name__ == "__main__":
    _main()

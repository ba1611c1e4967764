"""The parts of the check, and the processes that they run in.

A part is a module with `run(settings, report)`. A GPU whose kernel has failed is of no use to its process any more, and
a kernel that hangs cannot be interrupted, so each part has a process that can be killed.
"""

import importlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from benchmarks.gpu_check.report import FAILED, Message, Report, Row
from benchmarks.gpu_check.settings import Settings

START_LIMIT = 60.0
"""Seconds in which a process must have imported its part."""


class Part(NamedTuple):
    """A part, its module, and the seconds that it may take once that is imported."""

    name: str
    module: str
    limit: float


PARTS = (
    Part("machine", "benchmarks.gpu_check.machine", 30),
    Part("tests", "benchmarks.gpu_check.kernel_tests", 120),
    Part("kernels", "benchmarks.gpu_check.kernel_speed", 90),
    Part("engine", "benchmarks.gpu_check.engine_speed", 150),
    Part("equality", "benchmarks.gpu_check.equality", 75),
)


class _Started(NamedTuple):
    """A process's first message: its part is imported."""


def run_part(part: Part, settings: Settings, *, seconds_left: float = math.inf) -> Iterator[Message]:
    """Yield the rows of `part` as they become known, and a last one if it fails or takes too long."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(part, settings, sender), name=part.name)
    process.start()
    sender.close()
    try:
        yield from _receive(part, min(part.limit * settings.limit_factor, seconds_left), receiver, process)
    finally:
        _kill(process)


def _receive(part: Part, limit: float, receiver: Connection, process: BaseProcess) -> Iterator[Message]:
    deadline = time.monotonic() + START_LIMIT
    while receiver.poll(max(0.0, deadline - time.monotonic())):
        try:
            message = receiver.recv()
        except EOFError:
            process.join()
            if process.exitcode:
                yield Row(f"part {part.name}", f"ended with status {process.exitcode}", ok=FAILED)
            return
        if isinstance(message, _Started):
            deadline = time.monotonic() + limit
        else:
            yield message
    yield Row(f"part {part.name}", f"not done after {limit:.0f} s", ok=FAILED)


def _run(part: Part, settings: Settings, sender: Connection) -> None:
    """Run the part in this process, which gets a session of its own, so that its children can be killed with it."""
    os.setsid()
    report = Report(sender.send)
    with report.check(f"part {part.name}"):
        module = importlib.import_module(part.module)
        sender.send(_Started())
        module.run(settings, report)


def _kill(process: BaseProcess) -> None:
    """End the process and its children, in whatever state they are."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()

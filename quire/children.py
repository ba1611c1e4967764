"""`Child`: a process that the supervisor starts, keeps running and stops, and whose output it labels.

A child that ends is started again after a pause that grows while it keeps dying and is short again once it has lived
for a while. Before the server is ready for the first time, a child that exits by itself is not restarted, since it has
said why and would do so again; one that was killed is restarted a few times. Afterwards every death is followed by a
restart.
"""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

from shared.errors import QuireError
from shared.startup import EXIT_CANNOT_START

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
LIVED_A_WHILE = 10.0  # seconds after which a death does not count as one more in a row
DEATHS_BEFORE_READY = 3

CHUNK = 64 * 1024


class StartFailed(QuireError):
    """The server did not become ready; the message says why."""


class Log:
    """The supervisor's stderr. Each line begins with the name of the child that wrote it."""

    def __init__(self, out: BinaryIO) -> None:
        self.out = out
        self.last: dict[str, str] = {}  # the last line of each child, by name
        self.erase = b"\x1b[K" if out.isatty() else b""  # clears the rest of a longer progress bar

    def write(self, name: str, line: bytes) -> None:
        """Write one line, which ends in a newline or, if it is a progress bar, in a carriage return."""
        with suppress(OSError):  # the reader of the log is gone; serving goes on
            self.out.write(self.erase + f"{name:<9} | ".encode() + line)
            self.out.flush()

    async def pump(self, name: str, source: asyncio.StreamReader) -> None:
        """Copy `source` until it ends."""
        rest = b""
        while chunk := await source.read(CHUNK):
            *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
            if len(rest) > CHUNK:
                lines, rest = [*lines, rest + b"\n"], b""
            for line in lines:
                if line.strip():
                    self._note(name, line)
        if rest.strip():
            self._note(name, rest + b"\n")

    def _note(self, name: str, line: bytes) -> None:
        self.last[name] = line.decode(errors="replace").strip()
        self.write(name, line)


class Child:
    """A service of the server, and the process that runs it at the moment."""

    def __init__(self, name: str, argv: Sequence[str], log: Log, environment: Mapping[str, str]) -> None:
        self.name = name
        self.argv = [sys.executable, "-m", *argv]
        self.log = log
        self.environment = {**environment, "PYTHONUNBUFFERED": "1"}
        self.established = False  # once the server was ready, no death is final
        self.process: Process | None = None
        self._stop_requested = asyncio.Event()
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        pid = self.process.pid if self.process else None
        return f"<{self.name} pid={pid} to_run={not self._stop_requested.is_set()}>"

    async def keep_running(self) -> None:
        """Start the process again whenever it ends, until `stop`. Raise `StartFailed`."""
        clock, deaths = asyncio.get_running_loop().time, 0
        try:
            while not self._stop_requested.is_set():
                started = clock()
                status = await self._run()
                deaths = 1 if clock() - started > LIVED_A_WHILE else deaths + 1
                if not self._stop_requested.is_set():
                    pause = self.pause(status, deaths)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._stop_requested.wait(), pause)
        finally:
            self._ended.set()

    async def stop(self, grace: float) -> None:
        """Ask the process to end; after `grace` seconds, kill it. Returns when it is gone and `keep_running` done."""
        self._stop_requested.set()
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._ended.wait(), grace)
        except TimeoutError:
            self.log.write(self.name, f"did not end within {grace:.0f} s and is killed\n".encode())
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """End the process, and whatever it started, at once."""
        self._stop_requested.set()
        self._signal(signal.SIGKILL)

    @property
    def to_run(self) -> bool:
        """Return whether nobody has asked the process to stop."""
        return not self._stop_requested.is_set()

    def replace(self, reason: str) -> None:
        """Kill a process that makes no progress; `keep_running` starts another one. `reason` goes to the log."""
        self.log.write(self.name, f"is killed: {reason}\n".encode())
        self._signal(signal.SIGKILL)

    async def _run(self) -> int:
        self.process = process = await asyncio.create_subprocess_exec(
            *self.argv,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=self.environment,
            start_new_session=True,  # so that Ctrl-C reaches the supervisor alone
        )
        if self._stop_requested.is_set():  # while it was being started
            self._signal(signal.SIGTERM)
        assert process.stdout is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                pump = tasks.create_task(self.log.pump(self.name, process.stdout))
                status = await process.wait()
                await asyncio.wait([pump], timeout=1.0)  # something it started may keep the pipe open
                pump.cancel()
            return status
        finally:
            if process.returncode is None:
                self._signal(signal.SIGKILL)
            self.process = None

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process group: the process and all that it started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def pause(self, status: int, deaths: int) -> float:
        """Return the seconds until the next start, after `deaths` in a row. Raise `StartFailed` to give up."""
        if not self.established and (status >= 0 or deaths >= DEATHS_BEFORE_READY):
            often = f" {deaths} times" if deaths > 1 else ""
            raise StartFailed(f"the {self.name} ended{often} before it was ready{self._reason(status)}")
        pause: float = min(FIRST_PAUSE * 2.0 ** min(deaths - 1, 16), LONGEST_PAUSE)
        self.log.write(self.name, f"ended ({describe(status)}); starts again in {pause:.1f} s\n".encode())
        return pause

    def _reason(self, status: int) -> str:
        """Return why it ended, in its own words if it said so."""
        line = self.log.last.get(self.name, "")
        if status == EXIT_CANNOT_START and line.startswith(f"{self.name}: "):
            return line.removeprefix(self.name)
        return f" ({describe(status)})" + (f"; its last line: {line}" if line else "")


def describe(status: int) -> str:
    """Return an exit status in words."""
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"

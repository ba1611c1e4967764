"""`Child`: a service's process, which the supervisor starts, keeps running and stops, and whose output it logs.

A child that ends is started again after a pause. The pause doubles while the child keeps dying soon, and is short again
once it has lived for a while. Before the server is ready for the first time, a child that exits by itself is not
restarted, since it has logged the reason and would exit again; one that was killed is restarted a few times. After
that, a child is always restarted.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress

from quire.service_log import ServiceLog
from shared.errors import QuireError
from shared.startup import EXIT_CANNOT_START

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds
MIN_LIFETIME = 10.0  # seconds; a death after a longer life is the first in a row
MAX_DEATHS_BEFORE_READY = 3


class StartFailed(QuireError):
    """The server did not become ready; the message says why."""


class Child:
    """A service of the server, and the process that runs it at the moment.

    `role` says what it does, and `label` tells it from others that do the same.
    """

    def __init__(
        self,
        role: str,
        argv: Sequence[str],
        log: ServiceLog,
        environment: Mapping[str, str],
        label: str = "",
    ) -> None:
        self.role = role
        self.name = f"{role} {label}".rstrip()
        log.width = max(log.width, len(self.name))
        self.argv = [sys.executable, "-m", *argv]
        self.log = log
        self.environment = {**environment, "PYTHONUNBUFFERED": "1"}
        self.process: Process | None = None
        self._server_was_ready = False
        self._stop_requested = asyncio.Event()
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        pid = self.process.pid if self.process else None
        return f"<{self.name} pid={pid} to_run={self.to_run}>"

    async def keep_running(self) -> None:
        """Run the process, and start it again whenever it ends, until told otherwise. Raise `StartFailed`."""
        clock, deaths = asyncio.get_running_loop().time, 0
        try:
            while self.to_run:
                started = clock()
                status = await self._run()
                deaths = 1 if clock() - started > MIN_LIFETIME else deaths + 1
                if self.to_run:
                    pause = self.pause(status, deaths)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._stop_requested.wait(), pause)
        finally:
            self._ended.set()

    def let_end(self) -> None:
        """Do not start the process again when it ends."""
        self._stop_requested.set()

    async def stop(self, grace: float) -> None:
        """Ask the process to end, and kill it after `grace` seconds. Return once `keep_running` has ended."""
        self.let_end()
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._ended.wait(), grace)
        except TimeoutError:
            self.log.write(self.name, f"did not end within {grace:.0f} s and is killed")
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """Kill the process and all that it started, and do not start it again."""
        self.let_end()
        self._signal(signal.SIGKILL)

    @property
    def to_run(self) -> bool:
        """Return whether the process shall run: none of `let_end`, `stop` and `kill` was called."""
        return not self._stop_requested.is_set()

    def note_server_ready(self) -> None:
        """Note that the server has been ready: from now on the process is always restarted."""
        self._server_was_ready = True

    def replace(self, reason: str) -> None:
        """Kill a process that hangs, so that `keep_running` starts another one. `reason` is logged."""
        self.log.write(self.name, f"is killed: {reason}")
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
        if not self.to_run:  # `stop` was called while the process was being started
            self._signal(signal.SIGTERM)
        assert process.stdout is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                copying = tasks.create_task(self.log.copy(self.name, process.stdout))
                status = await process.wait()
                await asyncio.wait([copying], timeout=1.0)  # a process that it started may keep the pipe open
                copying.cancel()
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
        if not self._server_was_ready and (status >= 0 or deaths >= MAX_DEATHS_BEFORE_READY):
            times = f" {deaths} times" if deaths > 1 else ""
            name = self.name if self.name != self.role else f"the {self.role}"
            raise StartFailed(f"{name} ended{times} before it was ready{self._reason(status)}")
        pause: float = min(FIRST_PAUSE * 2.0 ** min(deaths - 1, 16), LONGEST_PAUSE)
        self.log.write(self.name, f"ended ({describe(status)}); starts again in {pause:.1f} s")
        return pause

    def _reason(self, status: int) -> str:
        """Return why the process ended: the error that it logged, or its exit status and last line."""
        line = self.log.last_lines.get(self.name, "")
        if status == EXIT_CANNOT_START and line.startswith(f"{self.role}: "):
            return line.removeprefix(self.role)
        return f" ({describe(status)})" + (f"; its last line: {line}" if line else "")


def describe(status: int) -> str:
    """Return an exit status in words."""
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"

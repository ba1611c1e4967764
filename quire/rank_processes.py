"""`RankProcesses`: ranks of a group that are processes of `services.worker`, and end with this process.

To them, this process is their scheduler: they connect to its socket, register, and answer what they are sent. What it
does not do is replace one that ends, since the others cannot go on without it.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import zmq
from msgspec.structs import replace

from quire.children import describe
from quire.settings import bare_environment, service_arguments
from services.worker.config import WorkerConfig
from shared.errors import EngineFailure, ProtocolError
from shared.protocol import (
    Configure,
    Fault,
    LoadAdapter,
    Register,
    StepPlan,
    StepResult,
    Stop,
    UnloadAdapter,
    WorkerToScheduler,
    decode_from_worker,
    encode,
)
from shared.transport import Message, PeerGone, PeerSlow, listen

CHECK_INTERVAL = 0.25
"""Seconds between two looks for processes that have ended before they had a connection."""

STOP_TIMEOUT = 2.0
"""Seconds that a rank has to end by itself."""


class RankProcesses:
    """The processes of `configs`, each with variables of its own. Their socket is in `folder`.

    Methods raise `EngineFailure` once one of the ranks has ended or failed.
    """

    def __init__(self, configs: Sequence[WorkerConfig], variables: Sequence[Mapping[str, str]], folder: Path) -> None:
        address = f"ipc://{folder}/ranks.sock"
        self._stack = ExitStack()
        self._listener = self._stack.enter_context(listen(self._stack.enter_context(zmq.Context()), address))
        self._poller = zmq.Poller()
        for source in (self._listener.socket, self._listener.monitor.socket):
            self._poller.register(source, zmq.POLLIN)
        self._ranks: dict[bytes, int] = {}  # by identity, of those that have registered
        self._connections: dict[int, int] = {}  # the same by the descriptors of their connections
        # Linux kills a child when the thread that started it ends, so this is one that lives as long as they may.
        self._starter = ThreadPoolExecutor(1, "ranks")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for config, own in zip(configs, variables, strict=True):
            config = replace(config, scheduler=address, supervisor=os.getpid(), log_level=_log_level())
            argv = [sys.executable, "-m", "services.worker", *service_arguments(config)]
            path = os.pathsep.join(filter(None, sys.path))
            environment = {**bare_environment(), "PYTHONPATH": path, **own}
            start = self._starter.submit(subprocess.Popen, argv, env=environment, stdin=subprocess.DEVNULL)
            self._processes[config.parallel.rank] = start.result()

    @property
    def number(self) -> int:
        return len(self._processes)

    def wake_by(self, descriptor: int) -> None:
        """Let `wait` return when `descriptor` can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def send(self, message: Configure | StepPlan | LoadAdapter | UnloadAdapter) -> None:
        """Send a message to all ranks, which have registered."""
        encoded = encode(message)
        for identity, rank in self._ranks.items():
            try:
                self._listener.send(identity, encoded)
            except (PeerGone, PeerSlow):
                self._report_end(rank)

    def wait(self) -> None:
        """Wait a little for messages."""
        self._poller.poll(int(CHECK_INTERVAL * 1000))

    def receive(self) -> list[tuple[int, WorkerToScheduler]]:
        """Read the messages that have come. Return those that answer something, each with its rank."""
        answers: list[tuple[int, WorkerToScheduler]] = []
        while (received := self._listener.receive()) is not None:
            message = self._decode(received)
            if isinstance(message, Register):
                self._ranks[received.peer] = self._connections[received.fd] = message.rank
            rank = self._ranks.get(received.peer)
            if message is None or rank is None:  # heartbeats come from nobody, by a connection of their own
                continue
            if isinstance(message, Fault):
                raise EngineFailure(f"rank {rank} failed: {message.detail.rstrip()}")
            if not isinstance(message, StepResult):
                answers.append((rank, message))
        lost = [rank for fd in self._listener.monitor.drain() if (rank := self._connections.get(fd)) is not None]
        for rank in lost + [rank for rank, process in self._processes.items() if process.poll() is not None]:
            self._report_end(rank)
        return answers

    def close(self) -> None:
        """End all processes. Idempotent."""
        for identity in self._ranks:
            with suppress(PeerGone, PeerSlow):
                self._listener.send(identity, encode(Stop()))
        for process in self._processes.values():
            if not self._ranks:  # they are still loading, and hear nothing
                process.kill()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ranks.clear()
        self._starter.shutdown()
        self._stack.close()

    def _decode(self, received: Message) -> WorkerToScheduler | None:
        """Return a message. If it is none, raise `EngineFailure` if a rank has sent it, and else return None."""
        try:
            return decode_from_worker(received.body)
        except ProtocolError as error:
            if (rank := self._ranks.get(received.peer)) is None:
                return None
            raise EngineFailure(f"rank {rank} sent an invalid message: {error}") from error

    def _report_end(self, rank: int) -> None:
        """Raise `EngineFailure`, with the rank and the way in which it has ended."""
        try:
            how = describe(self._processes[rank].wait(STOP_TIMEOUT))
        except subprocess.TimeoutExpired:
            how = "it does not read"
        raise EngineFailure(f"rank {rank} ended ({how})")


def _log_level() -> str:
    """Return the level of this process's log as a setting of a service."""
    level = logging.getLogger().getEffectiveLevel()
    names = ("debug", "info", "warning", "error", "critical")
    return next((name for name in names if logging.getLevelNamesMapping()[name.upper()] >= level), names[-1])

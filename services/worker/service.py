"""The worker's loop: one blocking DEALER, from which plans come and to which results go.

It drives any runner and knows nothing of models. Weights outlive a scheduler: when it is gone, the socket is closed,
and the same runner registers with the next one under a new identity; the `Configure` that follows resets its state. A
step that raises ends the process, since the state is unknown then. A step that never returns does too: the watchdog of
the standard library ends the process if the loop has not turned for `--scheduler-timeout` seconds, whatever holds it.

SIGTERM lets work in hand be finished: the loop ends at its first idle moment, or at once if the signal comes again.
"""

import faulthandler
import logging
import os
import signal
import time
import traceback
from enum import Enum
from types import FrameType
from typing import Any, Protocol

import zmq

from services.worker.config import WorkerConfig
from shared.errors import ProtocolError
from shared.heartbeat import HeartbeatSender, LoopTimer, Watcher, supervisor_watcher
from shared.protocol import (
    VERSION,
    Configure,
    Configured,
    Epoch,
    Fault,
    ModelInfo,
    Register,
    StepPlan,
    StepResult,
    Stop,
    decode_to_worker,
    encode,
)
from shared.transport import Monitor, connect, new_identity, printable_identity

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds that the loop waits for a plan before it looks at other things."""

PAUSE = 0.1
"""Seconds before a new connection is tried, lest one that fails at once be tried without end."""

LINGER_MS = 1_000
"""For a fault report to leave before the process ends."""


class WorkerInfo(Protocol):
    """What a runner knows of its model and device: the body of `Register`."""

    @property
    def model(self) -> ModelInfo: ...
    @property
    def device(self) -> str: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def kv_memory(self) -> int: ...
    @property
    def step_seconds(self) -> float: ...
    @property
    def token_seconds(self) -> float: ...


class Runner(Protocol):
    """A model on a device. `configure` comes before the first `execute` of an epoch; plans come in order."""

    @property
    def info(self) -> WorkerInfo: ...
    def configure(self, message: Configure) -> None: ...
    def execute(self, plan: StepPlan) -> StepResult: ...


class End(Enum):
    """Why one connection ended; the value is the exit status, if the process is to end with it."""

    STOPPED = 0
    FAILED = 1
    GONE = None  # the scheduler is: try to find another


class Service:
    """One worker rank. `run` returns the process's exit status."""

    def __init__(self, config: WorkerConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner
        self._stops = 0
        self._fed = -float("inf")  # when the watchdog was set last
        self.loop = LoopTimer()
        self.identity = ""  # of the present connection

    def stop(self) -> None:
        """End at the next idle moment. Meant for a signal handler."""
        self._stops += 1

    def run(self) -> int:
        """Serve one scheduler after the other until told to stop, or until none has come for too long."""
        to_scheduler = Watcher(self._config.scheduler, lambda: self.identity)
        to_supervisor = supervisor_watcher(self._config.supervisor_address, "worker")
        with zmq.Context() as context, HeartbeatSender(self.loop, [to_scheduler, *to_supervisor]):
            try:
                while True:
                    status: int | None = _Connection(self, self._config, self._runner, context).run().value
                    if status is not None:
                        return status
                    time.sleep(PAUSE)
            finally:
                faulthandler.cancel_dump_traceback_later()

    @property
    def stopping(self) -> bool:
        return self._stops > 0

    def feed_watchdog(self) -> None:
        """Tell the watchdog that the loop turns. Setting it starts a thread, hence not each time."""
        now, limit = time.monotonic(), self._config.scheduler_timeout
        if now - self._fed > limit / 10:
            self._fed = now
            faulthandler.dump_traceback_later(limit, exit=True)


class _Connection:
    """One identity's time with one scheduler."""

    def __init__(self, service: Service, config: WorkerConfig, runner: Runner, context: "zmq.Context[Any]") -> None:
        self._service = service
        self._config = config
        self._runner = runner
        self._context = context
        self._epoch: Epoch | None = None

    def run(self) -> End:
        name = new_identity("worker")
        with connect(self._context, self._config.scheduler, name) as (socket, monitor):
            self._service.identity = printable_identity(name)
            socket.send(encode(self._register(printable_identity(name))))
            end = self._serve(socket, monitor)
            socket.close(linger=LINGER_MS if end is End.FAILED else 0)
            return end

    def _serve(self, socket: "zmq.Socket[bytes]", monitor: Monitor) -> End:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor.socket, zmq.POLLIN)
        patience = time.monotonic() + self._config.scheduler_timeout
        while True:
            self._service.feed_watchdog()
            self._service.loop.begin_wait()
            events = dict(poller.poll(int(TICK * 1000)))
            self._service.loop.begin_turn()
            if socket in events:  # before the monitor: what the scheduler said last still counts
                end = self._answer(socket)
            elif monitor.drain():
                log.warning("the scheduler is gone; waiting for it with the model loaded")
                end = End.STOPPED if self._service.stopping else End.GONE
            else:
                end = self._idle(bool(monitor.connected), patience)
            if end is not None:
                return end

    def _idle(self, connected: bool, patience: float) -> End | None:
        if self._service.stopping:
            return End.STOPPED
        if not connected and time.monotonic() > patience:
            log.error("no scheduler for %.0f s", self._config.scheduler_timeout)
            return End.FAILED
        return None

    def _answer(self, socket: "zmq.Socket[bytes]") -> End | None:
        frames = socket.recv_multipart()
        try:
            message = decode_to_worker(b"".join(frames))
        except ProtocolError as error:
            log.error("the scheduler sent nonsense: %s", error)
            return End.FAILED
        match message:
            case Stop():
                log.info("the scheduler says to stop")
                return End.STOPPED
            case Configure():
                return self._configure(socket, message)
            case StepPlan():
                return self._execute(socket, message)

    def _configure(self, socket: "zmq.Socket[bytes]", message: Configure) -> End | None:
        try:
            self._runner.configure(message)
        except Exception:
            return self._fault(socket, message.epoch, 0)
        self._epoch = message.epoch
        log.info("configured: %d blocks of %d tokens", message.num_blocks, message.block_size)
        socket.send(encode(Configured(message.epoch)))
        return None

    def _execute(self, socket: "zmq.Socket[bytes]", plan: StepPlan) -> End | None:
        if plan.epoch != self._epoch:
            log.warning("passed over a plan of epoch %s", plan.epoch)
            return None
        try:
            result = self._runner.execute(plan)
        except Exception:
            return self._fault(socket, plan.epoch, plan.step)
        socket.send(encode(result))
        return None

    def _fault(self, socket: "zmq.Socket[bytes]", epoch: Epoch, step: int) -> End:
        detail = traceback.format_exc()
        log.error("step %d failed:\n%s", step, detail.rstrip())
        socket.send(encode(Fault(epoch, step, detail)))
        return End.FAILED

    def _register(self, name: str) -> Register:
        found = self._runner.info
        return Register(
            version=VERSION,
            identity=name,
            rank=0,
            world_size=1,
            pid=os.getpid(),
            device=found.device,
            model=found.model,
            kv_bytes_per_token=found.kv_bytes_per_token,
            kv_memory=found.kv_memory,
            step_seconds=found.step_seconds,
            token_seconds=found.token_seconds,
        )


def serve(config: WorkerConfig, runner: Runner) -> int:
    """Serve with signal handling; the process's exit status."""
    service = Service(config, runner)

    def stop(number: int, _: FrameType | None) -> None:
        if service.stopping:
            os._exit(128 + number)  # asked twice: do not wait for the step
        service.stop()

    signal.signal(signal.SIGTERM, stop)
    if not config.supervisor:
        signal.signal(signal.SIGINT, stop)
    return service.run()

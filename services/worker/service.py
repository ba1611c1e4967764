"""The worker's loop: it receives plans and sends results over one DEALER socket.

The loop blocks, without asyncio. A worker has one peer, and on a CPU it computes in the thread that reads from it, so
an event loop would have nothing to run during a step. It would also cost time: a round trip takes 90 µs between
blocking sockets, and 160 to 280 µs if one side is asyncio. Heartbeats must continue during a step, so they have their
own thread (`shared.heartbeat`). A GPU's steps are only launched by the loop; another thread waits for them
(`result_waiter.py`).

The service drives any runner and knows nothing of models. Weights outlive a scheduler: if it is gone, the service
closes the socket and registers the same runner with the next one under a new identity; the `Configure` that follows
resets the runner's state. A step that raises ends the process, since the state is unknown then. A step that does not
return also ends it: `faulthandler` is a watchdog, which exits if the loop has not turned, or the device has finished
none of its steps, for `--scheduler-timeout` seconds.

A rank of a group waits for the others in its exchanges, where nothing can interrupt it. So it does that beside the
loop (`result_waiter.py`). If the loop is told to stop or loses its scheduler meanwhile, it ends the process at once:
the ranks that it waits for may be gone.

After SIGTERM, the worker tells its scheduler that it leaves, and computes what it is sent until the scheduler says
`Stop`, which comes between two steps: nothing is lost. A second signal ends the process at once.
"""

import faulthandler
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from enum import Enum
from functools import partial
from types import FrameType
from typing import Any

import zmq

from services.worker.adapter_loader import AdapterLoader
from services.worker.config import WorkerConfig
from services.worker.interface import OutOfMemory, RankLost, Runner
from services.worker.result_waiter import Failure, Result, ResultWaiter
from services.worker.running_requests import RunningRequests
from shared.curve import ConnectionKeys
from shared.errors import ProtocolError
from shared.heartbeat import HeartbeatSender, LoopTimer, Watcher, supervisor_watcher
from shared.log_format import of_requests
from shared.protocol import (
    VERSION,
    Configure,
    Configured,
    Epoch,
    Fault,
    Leave,
    LoadAdapter,
    Register,
    StepPlan,
    StepResult,
    Stop,
    UnloadAdapter,
    decode_to_worker,
    encode,
)
from shared.transport import (
    MAX_REFUSED_DELAY,
    Monitor,
    connect,
    new_identity,
    only_frame,
    printable_identity,
    receive_frames,
)

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.25
"""Seconds that the loop waits for a message before it checks signals and deadlines."""

RECONNECT_DELAY = 0.1
"""Seconds before the next connection, so that connections that fail at once do not keep a CPU busy."""

LEAVE_TIMEOUT = 5.0
"""Seconds of a scheduler's silence after which a worker that leaves it no longer waits for `Stop`."""

LINGER = 1.0
"""Seconds in which a `Fault` must be sent before the process ends."""


class CloseReason(Enum):
    """The reason why a connection was closed. The value is the exit status, or None to connect again."""

    STOPPED = 0
    FAILED = 1
    SCHEDULER_LOST = None


class Service:
    """A worker rank: a runner and the scheduler that it serves, one after the other."""

    def __init__(
        self,
        config: WorkerConfig,
        runner: Runner,
        keys: ConnectionKeys | None = None,
        *,
        on_configured: Callable[[], None] | None = None,
    ) -> None:
        """`on_configured` is called once, after the first `Configure`: by then the sockets have their threads."""
        self.runner = runner
        self.keys = keys
        self._config = config
        self._on_configured = on_configured
        self._stops = 0
        self._watchdog_set_at = -float("inf")
        self.loop = LoopTimer()
        self.identity = ""  # of the current connection
        self.refusal = ""  # why the last connection was of no use, so that the next one waits longer; empty if it was
        self.deadline = 0.0  # by which a scheduler must be there

    def stop(self) -> None:
        """End as soon as the scheduler agrees. Meant for a signal handler."""
        self._stops += 1

    def run(self) -> int:
        """Serve one scheduler after the other until told to stop, or until none has come for too long.

        Return the exit status of the process.
        """
        to_scheduler = Watcher(self._config.scheduler, lambda: self.identity, self.keys)
        to_supervisor = supervisor_watcher(self._config.supervisor_address, "worker")
        heartbeats = HeartbeatSender(self.loop, [to_scheduler, *to_supervisor])
        with zmq.Context() as context, ThreadPoolExecutor(1, "adapters") as adapter_thread, heartbeats:
            adapter_thread.submit(int)  # starts it before this thread is pinned to a processor, which it would inherit
            self.renew_deadline()
            delay = RECONNECT_DELAY
            try:
                while True:
                    status: int | None = _Connection(self, self._config, context, adapter_thread).run().value
                    if status is not None:
                        return status
                    delay = min(2 * delay, MAX_REFUSED_DELAY) if self.refusal else RECONNECT_DELAY
                    time.sleep(delay)
            finally:
                faulthandler.cancel_dump_traceback_later()

    @property
    def stopping(self) -> bool:
        return self._stops > 0

    def renew_deadline(self) -> None:
        """Wait for a scheduler for the whole `--scheduler-timeout` from now."""
        self.deadline = time.monotonic() + self._config.scheduler_timeout

    @property
    def in_group(self) -> bool:
        """Whether other ranks compute the model too, for which this one has to wait."""
        return self._config.parallel.world_size > 1

    def configure(self, message: Configure) -> Configured:
        """Configure the runner, and call `on_configured` if this is the first time."""
        self.runner.configure(message)
        if self._on_configured is not None:
            self._on_configured()
            self._on_configured = None
        logger.info("configured: %d blocks of %d tokens", message.num_blocks, message.block_size)
        return Configured(message.epoch)

    def feed_watchdog(self) -> None:
        """Reset the watchdog, but not each time: setting it starts a thread."""
        now, limit = time.monotonic(), self._config.scheduler_timeout
        if now - self._watchdog_set_at > limit / 10:
            self._watchdog_set_at = now
            faulthandler.dump_traceback_later(limit, exit=True)


class _Connection:
    """A connection to the scheduler: a socket and its identity."""

    def __init__(
        self, service: Service, config: WorkerConfig, context: "zmq.Context[Any]", adapter_thread: ThreadPoolExecutor
    ) -> None:
        self._service = service
        self._config = config
        self._context = context
        self._adapter_thread = adapter_thread
        self._epoch: Epoch | None = None
        self._requests = RunningRequests()
        self._leaving = False  # whether the scheduler was told
        self._last_event = 0.0  # time of the last message, or of `Leave`

    def run(self) -> CloseReason:
        name = new_identity("worker")
        with connect(self._context, self._config.scheduler, name, self._service.keys) as (socket, monitor):
            self._service.identity = printable_identity(name)
            socket.send(encode(self._register(printable_identity(name))))
            loader = AdapterLoader(self._context, self._service.runner, self._adapter_thread)
            with closing(loader), closing(ResultWaiter(self._context)) as waiter:
                reason = self._serve(socket, monitor, waiter, loader)
                if self._service.in_group:
                    self._end_if_waiting(reason, waiter)
            self._service.identity = ""
            socket.close(linger=int(LINGER * 1000) if reason is CloseReason.FAILED else 0)
            return reason

    def _end_if_waiting(self, reason: CloseReason, waiter: ResultWaiter) -> None:
        """End the process if it may be waiting for other ranks, which may be gone.

        Without a scheduler it otherwise keeps its weights. But a GPU's connection to ranks that are gone cannot be
        closed.
        """
        if reason is CloseReason.FAILED:
            waits = not waiter.end(LINGER)  # meanwhile the fault is sent
        else:
            on_gpu = not self._service.runner.info.device.startswith("cpu")
            waits = waiter.num_pending > 0 or (on_gpu and self._epoch is not None)
        if waits:
            level = logging.INFO if reason is CloseReason.STOPPED else logging.WARNING
            logger.log(level, "ending without the other ranks")
            logging.shutdown()
            os._exit(CloseReason.FAILED.value if reason.value is None else reason.value)

    def _serve(
        self, socket: "zmq.Socket[bytes]", monitor: Monitor, waiter: ResultWaiter, loader: AdapterLoader
    ) -> CloseReason:
        poller = zmq.Poller()
        for source in (socket, waiter.socket, loader.socket, monitor.socket):
            poller.register(source, zmq.POLLIN)
        while True:
            if not waiter.num_pending:
                self._service.feed_watchdog()
            if self._service.stopping and not self._leaving:
                self._leave(socket)
            self._service.loop.begin_wait()
            events = dict(poller.poll(int(POLL_INTERVAL * 1000)))
            self._service.loop.begin_turn()
            if waiter.socket in events:
                self._service.feed_watchdog()
                reason = self._send(socket, waiter.take())
            elif loader.socket in events:
                reason = None
                self._send_answer(socket, loader)
            elif socket in events:  # before the monitor: the scheduler's last messages still count
                reason = self._handle_message(socket, waiter, loader)
            elif monitor.drain():
                reason = self._lose_scheduler(monitor.refusal)
            else:
                reason = None if waiter.num_pending else self._check_idle(bool(monitor.connected))
            if reason is not None:
                return reason
            if events:
                self._last_event = time.monotonic()

    def _leave(self, socket: "zmq.Socket[bytes]") -> None:
        logger.info("told to end: leaving the scheduler")
        socket.send(encode(Leave()))
        self._leaving = True
        self._last_event = time.monotonic()

    def _lose_scheduler(self, refusal: str) -> CloseReason:
        if self._service.stopping:
            logger.info("the scheduler is gone")
        elif not refusal:
            logger.warning("the scheduler is gone; waiting for it with the model loaded")
            self._service.renew_deadline()
        elif not self._service.refusal:
            logger.error("no connection to the scheduler at %s: %s", self._config.scheduler, refusal)
        self._service.refusal = refusal
        return self._check_idle(connected=False) or CloseReason.SCHEDULER_LOST

    def _leave_scheduler(self, error: ProtocolError) -> CloseReason:
        """Connect again after a message that cannot be read. A scheduler is there, so there is time until the next."""
        if not self._service.refusal:
            logger.error("the scheduler at %s sent an invalid message: %s", self._config.scheduler, error)
        self._service.refusal = str(error)
        self._service.renew_deadline()
        return self._check_idle(connected=False) or CloseReason.SCHEDULER_LOST

    def _check_idle(self, connected: bool) -> CloseReason | None:
        if self._service.stopping:
            # A worker that has been idle for longer has not told the scheduler yet.
            waits = connected and (not self._leaving or time.monotonic() - self._last_event < LEAVE_TIMEOUT)
            return None if waits else CloseReason.STOPPED
        if not connected and time.monotonic() > self._service.deadline:
            logger.error("no scheduler for %.0f s", self._config.scheduler_timeout)
            return CloseReason.FAILED
        return None

    def _handle_message(
        self, socket: "zmq.Socket[bytes]", waiter: ResultWaiter, loader: AdapterLoader
    ) -> CloseReason | None:
        frames = receive_frames(socket)
        try:
            if not (body := only_frame(frames)):
                return None
            message = decode_to_worker(body)
        except ProtocolError as error:  # its plans are lost with it, but this process is as good as before
            return self._leave_scheduler(error)
        match message:
            case Stop():
                logger.info("the scheduler says to stop")
                return CloseReason.STOPPED
            case Configure():
                return self._configure(socket, message, waiter, loader)
            case StepPlan():
                return self._launch(socket, message, waiter)
            case LoadAdapter():
                loader.load(message)
            case UnloadAdapter():
                loader.unload(message.adapter)
        return None

    def _send_answer(self, socket: "zmq.Socket[bytes]", loader: AdapterLoader) -> None:
        if answer := loader.take():
            socket.send(encode(answer))

    def _configure(
        self, socket: "zmq.Socket[bytes]", message: Configure, waiter: ResultWaiter, loader: AdapterLoader
    ) -> CloseReason | None:
        loader.forget()
        if self._service.in_group:
            waiter.add(message, partial(self._service.configure, message))
            return None
        try:
            configured = self._service.configure(message)
        except Exception as error:
            return self._send(socket, Failure(message, error))
        return self._send(socket, configured)

    def _launch(self, socket: "zmq.Socket[bytes]", plan: StepPlan, waiter: ResultWaiter) -> CloseReason | None:
        if plan.epoch != self._epoch:
            logger.warning("ignored a plan of epoch %s", plan.epoch)
            return None
        self._requests.launch(plan)
        try:
            step = self._service.runner.launch(plan)
            if waiter.num_pending or not step.is_done:
                waiter.add(plan, step.result)
                return None
            result = step.result()
        except Exception as error:
            return self._send(socket, Failure(plan, error))
        return self._send(socket, result)

    def _send(self, socket: "zmq.Socket[bytes]", result: Result) -> CloseReason | None:
        match result:
            case Failure(request, error):
                return self._send_fault(socket, request, error)
            case Configured():
                self._epoch = result.epoch
                self._service.refusal = ""
            case StepResult():
                self._requests.finish()
        socket.send(encode(result))
        return None

    def _send_fault(self, socket: "zmq.Socket[bytes]", request: StepPlan | Configure, error: Exception) -> CloseReason:
        step, task, extra = 0, "the configuration", of_requests(())
        if isinstance(request, StepPlan):
            step, task, extra = request.step, f"step {request.step}", of_requests(self._requests.of_step(request))
        if isinstance(error, OutOfMemory | RankLost):  # whose messages say all
            logger.error("%s: %s", task, error, extra=extra)
            logger.debug("it failed here", exc_info=error)
            socket.send(encode(Fault(request.epoch, step, str(error), isinstance(error, OutOfMemory))))
            return CloseReason.FAILED
        logger.error("%s failed", task, exc_info=error, extra=extra)
        socket.send(encode(Fault(request.epoch, step, "".join(traceback.format_exception(error)))))
        return CloseReason.FAILED

    def _register(self, name: str) -> Register:
        info, parallel = self._service.runner.info, self._config.parallel
        return Register(
            version=VERSION,
            identity=name,
            rank=parallel.rank,
            world_size=parallel.world_size,
            pid=os.getpid(),
            device=info.device,
            model=info.model,
            kv_bytes_per_token=info.kv_bytes_per_token,
            kv_memory=info.kv_memory,
            step_seconds=info.step_seconds,
            token_seconds=info.token_seconds,
            host_kv_memory=info.host_kv_memory,
            swap_bytes_per_second=info.swap_bytes_per_second,
            max_loras=info.max_loras,
            max_cpu_loras=info.max_cpu_loras,
            num_stages=info.num_stages,
        )


def serve(
    config: WorkerConfig,
    runner: Runner,
    keys: ConnectionKeys | None = None,
    *,
    on_configured: Callable[[], None] | None = None,
) -> int:
    """Serve with signal handling; see `Service`. Return the exit status of the process."""
    service = Service(config, runner, keys, on_configured=on_configured)

    def stop(number: int, _: FrameType | None) -> None:
        if service.stopping:
            os._exit(128 + number)  # asked twice: do not wait for the step
        service.stop()

    signal.signal(signal.SIGTERM, stop)
    if not config.supervisor:
        signal.signal(signal.SIGINT, stop)
    return service.run()

"""`EngineConnection`: a gateway's connection to one engine, and the requests that run there.

One task, `run`, owns the socket. While it is open, the event loop calls `_read_from_loop` when messages have come.
That reads a bounded number of them in each turn of the loop, so that clients are served in between, and passes their
rows to the requests. No task has to be woken for it. An engine is lost when its connection ends, when it is overdue,
when it reads no more messages, when it sends something that is not a message, or when it has dropped this gateway.
Then its requests are told, so that they go on elsewhere, and a new socket is opened under a new identity. The old one
is closed with what is queued in it.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from msgspec import Struct

from services.gateway.engine_request import EngineRequest
from services.gateway.errors import UnknownModel
from services.gateway.metrics import EngineLosses
from shared.curve import ConnectionKeys
from shared.errors import (
    ConfigError,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    QuireError,
    Unavailable,
)
from shared.liveness import GATEWAY_TIMEOUT, Liveness
from shared.log_format import of_requests
from shared.protocol import (
    VERSION,
    Abort,
    Accepted,
    AdapterAnswer,
    AdapterInfo,
    AddAdapter,
    Hello,
    PrefixCacheReset,
    Progress,
    Refusal,
    Refused,
    RemoveAdapter,
    ResetPrefixCache,
    SchedulerToGateway,
    Status,
    UnknownGateway,
    Welcome,
    decode_to_gateway,
    encode,
)
from shared.transport import (
    MAX_REFUSED_DELAY,
    DropReason,
    Monitor,
    connect,
    has_message,
    new_identity,
    only_frame,
    printable_identity,
    receive_frames,
)

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 0.5
"""Maximum seconds between two checks whether the engine is overdue."""

STATUS_LIFETIME = 2.0
"""Seconds after which a `Status` is out of date."""

ENGINE_TIMEOUT = 2.0
"""Seconds of silence after which an engine counts as dead, unless this process is short of CPU.

An engine sends a `Status` four times a second. If it was alive after all, its requests go on under new ids.
"""

WORKER_ABSENCE = 5.0
"""Seconds without a worker after which requests go on at another engine.

A worker that starts again sooner goes on with them itself, and each engine keeps its share of the work.
"""

RECONNECT_DELAY = 0.05
"""Seconds before the gateway opens a new connection; more after several refusals."""

MAX_MESSAGES = 64
"""Messages read before other tasks run."""

MALFORMED = "it sent something that is not a message"
"""Why an engine is left that does so: a request might wait for that message forever."""


class EngineConnection:
    """Connects to one engine, and keeps its state as the gateway knows it.

    `short_of_cpu` returns whether this process is short of CPU at a time of the monotonic clock.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        address: str,
        *,
        text_digest: str,
        short_of_cpu: Callable[[float], bool],
        on_status: Callable[["EngineConnection"], None],
        keys: ConnectionKeys | None,
        losses: EngineLosses,
    ) -> None:
        """`on_status` is called for each status that has come. Losses and dropped messages are counted in `losses`."""
        self.address = address
        self.welcome: Welcome | None = None  # of this connection
        self.status: Status | None = None  # the last one of this connection
        self.adapters: dict[str, AdapterInfo] = {}  # that requests can name, by name; those of the last welcome
        self.unusable = ""  # why this engine gets no requests although it is connected
        self.leaving = False  # it gets no new requests, and is left once its running ones have ended
        self._text_digest = text_digest
        self._context = context
        self._short_of_cpu = short_of_cpu
        self._on_status = on_status
        self._keys = keys
        self._losses = losses
        self._boot_id = ""  # of the engine's last process; empty before the first
        self._refusal = ""  # why the last connection was of no use, so that the next one waits longer; empty if it was
        self._identity = ""  # of this connection
        self._liveness = Liveness(ENGINE_TIMEOUT, 0.0)  # of the engine, on this connection
        self._status_time = 0.0  # when `status` came; 0: it no longer holds
        self._not_ready_since: float | None = None  # by the statuses of this connection; None: the last one was ready
        self._num_added = 0  # samples submitted since then, less those of requests that have ended since then
        self._ids = itertools.count()
        self._requests: dict[int, EngineRequest] = {}
        self._with_rows: list[EngineRequest] = []  # that the present read has found
        self._resets: dict[int, asyncio.Future[None]] = {}  # of the prefix cache, which the engine has not confirmed
        self._adapter_answers: dict[int, asyncio.Future[str]] = {}  # errors, that the engine has not answered yet
        self._restored: dict[int, AdapterInfo] = {}  # by the ids of the messages that load them again
        self._socket: zmq.Socket[bytes] | None = None
        self._loss = ""  # why this connection has to end
        self._loop = asyncio.get_running_loop()
        self._check_due = asyncio.Event()  # whether this connection may have to end
        self._will_read = False  # in the loop's next turn
        self._failure: Exception | None = None  # of a read by the loop

    def registered_name(self) -> str:
        """Return the name by which the engine knows this gateway, or '' until a status shows that it does."""
        return self._identity if self.status is not None else ""

    @property
    def ready(self) -> bool:
        """Return whether the engine computes steps and accepts requests, by its last status."""
        status = self.status
        if self.welcome is None or status is None or time.monotonic() - self._status_time > STATUS_LIFETIME:
            return False
        return status.ready and not self.draining

    @property
    def draining(self) -> bool:
        """Return whether the engine takes no new requests."""
        return self.leaving or (self.status is not None and self.status.draining)

    @property
    def _without_worker(self) -> bool:
        return self._not_ready_since is not None and self._status_time - self._not_ready_since > WORKER_ABSENCE

    @property
    def load(self) -> int:
        """Return the number of sequences at the engine: by its last status, and what this gateway has changed since."""
        snapshot = self.status.snapshot if self.status else None
        return max(self._num_added + (snapshot.running + snapshot.waiting if snapshot else 0), 0)

    @property
    def name(self) -> str:
        return self.welcome.engine if self.welcome else self.address

    def place(self, request: EngineRequest) -> None:
        """Submit the samples of a request that are at no engine."""
        for submit in request.place(self, self._ids):
            self._requests[submit.id] = request
            self._num_added += submit.n
            self._send(submit)

    def release(self, request: EngineRequest) -> None:
        """Forget a request, and abort at the engine what is unfinished."""
        for attempt in request.attempts_at(self):
            if self._requests.pop(attempt.id, None) is not None:
                self._num_added -= attempt.size
                if attempt.samples:
                    self.abort(attempt.id)

    def hand_over(self, may_move: Callable[[EngineRequest], bool]) -> None:
        """Give up the requests at this engine that may move to another one, if it drains or has no worker for long.

        The latter counts as a loss of the engine, since a request may be what ends its workers.
        """
        drains = self.status is not None and self.status.draining
        if not drains and not self._without_worker:
            return
        for request in filter(may_move, list(dict.fromkeys(self._requests.values()))):
            self.release(request)
            if drains:
                request.leave(self, "it drains")
            else:
                request.lose(self, f"it had no worker for {WORKER_ABSENCE:g} s")

    def abort(self, id: int, sample: int = -1) -> None:
        """Send an `Abort`."""
        self._send(Abort(id, sample))

    async def reset_prefix_cache(self) -> None:
        """Have the engine forget its cached blocks, and return when it has.

        Raise `Unavailable` if it is not connected, or is lost before it answers.
        """
        if self.welcome is None:
            raise Unavailable(f"the engine at {self.address} is not connected: its prefix cache was not reset")
        id, reset = next(self._ids), asyncio.get_running_loop().create_future()
        self._resets[id] = reset
        try:
            self._send(ResetPrefixCache(id))
            await reset
        finally:
            self._resets.pop(id, None)

    async def add_adapter(self, name: str, path: str, *, replaces: bool) -> str:
        """Have the engine load an adapter. Return why it cannot, or ''. Raise as `reset_prefix_cache` does."""
        return await self._ask_adapter(AddAdapter(next(self._ids), name, path, replaces))

    async def remove_adapter(self, name: str) -> str:
        """Let no new request name an adapter. Return and raise as `add_adapter` does."""
        return await self._ask_adapter(RemoveAdapter(next(self._ids), name))

    async def _ask_adapter(self, message: AddAdapter | RemoveAdapter) -> str:
        if self.welcome is None:
            raise Unavailable(f"the engine at {self.address} is not connected")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._adapter_answers[message.id] = answer
        try:
            self._send(message)
            return await answer
        finally:
            self._adapter_answers.pop(message.id, None)

    def has_adapter(self, name: str) -> bool:
        """Return whether the engine can use an adapter now."""
        return self.welcome is not None and any(adapter.name == name for adapter in self.welcome.adapters)

    async def run(self) -> None:
        """Keep the engine connected until cancelled, or while `leaving` until it has no requests or is lost.

        When a connection ends, its requests lose the engine.
        """
        delay = RECONNECT_DELAY
        try:
            while True:
                former_refusal = self._refusal
                try:
                    reason = await self._run_connection()
                except (ConfigError, zmq.ZMQError) as error:  # of one socket, and not of the whole gateway
                    reason = self._refusal = str(error)
                requests = self._take_requests()
                if not self._refusal:
                    level, ended = (logging.INFO, "left") if self.leaving else (logging.WARNING, "lost")
                    logger.log(
                        level,
                        "engine at %s was %s: %s (%d requests)",
                        self.address,
                        ended,
                        reason,
                        len(requests),
                        extra=of_requests(request.request_id for request in requests),
                    )
                elif not former_refusal:
                    logger.error("no connection to the engine at %s: %s", self.address, reason)
                for request in requests:
                    request.lose(self, reason)
                if self.leaving:
                    return
                delay = min(2 * delay, MAX_REFUSED_DELAY) if self._refusal else RECONNECT_DELAY
                await asyncio.sleep(delay)
        finally:
            for request in self._take_requests():
                request.fail(EngineFailure("the gateway is shutting down"))

    async def _run_connection(self) -> str:
        """Open a connection, and handle its messages until the engine is lost. Return the reason."""
        name = new_identity("gateway")
        with connect(self._context, self.address, name, self._keys) as (socket, monitor):
            self._socket, self._identity, self._loss = socket, printable_identity(name), ""
            self._liveness = Liveness(ENGINE_TIMEOUT, time.monotonic())
            try:
                self._send(Hello(VERSION, printable_identity(name)))
                reason = await self._receive(socket, monitor)
                if self.welcome is not None and not self.leaving:  # otherwise no engine was there, or none was lost
                    detection = self._losses.detection.labels(self.name)
                    detection.observe(time.monotonic() - self._liveness.last_heard)
                return reason
            finally:
                for reset in self._resets.values():
                    if not reset.done():
                        reason = f"the engine at {self.address} was lost before it had reset its prefix cache"
                        reset.set_exception(Unavailable(reason))
                for answer in self._adapter_answers.values():
                    if not answer.done():
                        reason = f"the engine at {self.address} was lost before it had changed its adapters"
                        answer.set_exception(Unavailable(reason))
                self._refusal = monitor.refusal or (MALFORMED if self._loss == MALFORMED else "")
                self._socket = self.welcome = self.status = self._not_ready_since = None
                self.unusable = ""

    async def _receive(self, socket: "zmq.Socket[bytes]", monitor: Monitor) -> str:
        """Handle messages until the engine is lost. Return the reason."""
        descriptors = [int(one.getsockopt(zmq.FD)) for one in (socket, monitor.socket)]
        for descriptor, callback in zip(descriptors, (self._read_from_loop, self._check_due.set), strict=True):
            self._loop.add_reader(descriptor, callback)
        try:
            return await self._watch(monitor)
        finally:
            for descriptor in descriptors:
                self._loop.remove_reader(descriptor)

    async def _watch(self, monitor: Monitor) -> str:
        """Return why the engine is lost, when it is."""
        last_check = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL):
                    await self._check_due.wait()
            self._check_due.clear()
            if self._failure is not None:
                raise self._failure
            woken = time.monotonic()
            more = self._read()  # what has come counts, even if the loop could not read it in time
            if not more and monitor.drain():
                self._liveness.note_message(woken)  # until now, the connection was there
                return monitor.refusal or "its connection ended"
            now = time.monotonic()
            since_last_check, last_check = now - last_check, now
            if not monitor.connected:
                self._liveness.note_message(now)  # its silence does not count before it is connected
            if reason := self._loss_reason(now, since_last_check):
                return reason

    def _loss_reason(self, now: float, since_last_check: float) -> str:
        """Return why the engine is lost, or ''. Times are in seconds."""
        if self._loss:
            return self._loss
        if self.leaving and not self._requests:
            return "it is not among --engines any more"
        if since_last_check > GATEWAY_TIMEOUT:  # then the engine has dropped this gateway
            return f"this gateway stood still for {since_last_check:.0f} s, and was given up meanwhile"
        overdue = self._liveness.failure(now, short_of_cpu=self._short_of_cpu(now))
        return f"it has been {overdue}" if overdue else ""

    def _read_from_loop(self) -> None:
        """Read, and keep an error for `_watch` to raise: the event loop would log it and go on without the message."""
        try:
            self._read()
        except Exception as error:
            self._failure = error
            self._check_due.set()

    def _read_soon(self) -> None:
        """Read in the loop's next turn. However often this is called, that is once a turn."""
        if not self._will_read:
            self._will_read = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._will_read = False
        self._read_from_loop()

    def _read(self) -> bool:
        """Handle the messages that have come, up to a bound. Return whether more are read in the loop's next turn.

        Each request gets the rows of all of them at once.
        """
        try:
            return self._read_messages()
        finally:
            requests, self._with_rows = self._with_rows, []
            for request in requests:
                request.deliver()

    def _read_messages(self) -> bool:
        for _ in range(MAX_MESSAGES):
            if self._socket is None or not has_message(self._socket):
                return False
            try:
                if body := only_frame(receive_frames(self._socket)):
                    self._handle(decode_to_gateway(body))
            except ProtocolError as error:
                logger.error("engine at %s: %s", self.address, error)
                self._losses.count_drop(self.name, DropReason.MALFORMED)
                self._lose(MALFORMED)
                return False
        self._read_soon()
        return True

    def _handle(self, message: SchedulerToGateway) -> None:
        now = time.monotonic()
        if isinstance(message, UnknownGateway):  # not a sign of life, since the engine does nothing for this gateway
            self._lose("it has given this gateway up")
            return
        self._liveness.note_message(now)
        match message:
            case Progress():
                requests, with_rows = self._requests, self._with_rows
                for row in message.rows:
                    if (request := requests.get(row.id) or self._find(row.id)) is not None:
                        request.add(row)
                        with_rows.append(request)
            case Accepted():
                for id in message.ids:
                    if (request := self._find(id)) is not None:
                        request.accept()
            case Refused():
                self._handle_refusal(message)
            case PrefixCacheReset():
                if (reset := self._resets.get(message.id)) is not None and not reset.done():
                    reset.set_result(None)
            case AdapterAnswer():
                self._take_adapter_answer(message)
            case Status():
                self.status, self._status_time, self._num_added = message, now, 0
                self._not_ready_since = None if message.ready else self._not_ready_since or now
                self._liveness.note_heartbeat(message.process, now)
                self._on_status(self)
            case Welcome() if self._text_digest and message.model.text_digest not in ("", self._text_digest):
                self._losses.count_drop(self.name, DropReason.NOT_ADMITTED)
                self.unusable = "the engine has loaded another model than this gateway: its files have changed"
                logger.error("engine at %s: %s; restart both", self.address, self.unusable)
            case Welcome():
                self._losses.init_labels(message.engine)
                is_new = self._boot_id not in ("", message.boot_id)
                if is_new:
                    self._losses.restarts.labels(message.engine).inc()
                if is_new or self.welcome is None:
                    self._restore_adapters(message.adapters, is_new=is_new)
                self.welcome, self._boot_id = message, message.boot_id
                self._take_adapters(message.adapters)
                logger.info("engine %s at %s serves %s", message.engine, self.address, message.model.name)

    def _restore_adapters(self, adapters: list[AdapterInfo], *, is_new: bool) -> None:
        """Load adapters again that the engine lacks, on a new connection: those of its former process if it `is_new`.

        They were loaded at run time, and their requests go on here. What an earlier connection has asked for and not
        seen done is asked for again, since its answer is lost.
        """
        former = self.adapters if is_new else {adapter.name: adapter for adapter in self._restored.values()}
        self._restored = {}
        present = {adapter.name for adapter in adapters}
        for adapter in former.values():
            if adapter.name not in present:
                id = next(self._ids)
                self._restored[id] = adapter
                self._send(AddAdapter(id, adapter.name, adapter.path))

    def _take_adapters(self, adapters: list[AdapterInfo]) -> None:
        """Take the adapters of a welcome, and those that are being restored."""
        present = {adapter.name: adapter for adapter in adapters}
        self._restored = {id: one for id, one in self._restored.items() if one.name not in present}
        self.adapters = present | {adapter.name: adapter for adapter in self._restored.values()}

    def _take_adapter_answer(self, message: AdapterAnswer) -> None:
        restored = self._restored.pop(message.id, None)
        if restored is not None and message.error and not self.has_adapter(restored.name):
            del self.adapters[restored.name]
            logger.error("engine %s has lost the adapter %s: %s", self.name, restored.name, message.error)
        answer = self._adapter_answers.get(message.id)
        if answer is not None and not answer.done():
            answer.set_result(message.error)

    def _handle_refusal(self, refused: Refused) -> None:
        request = self._find(refused.id)
        if request is None:
            return
        is_passing = refused.reason in (Refusal.DRAINING, Refusal.NOT_READY)
        if is_passing or (refused.reason is Refusal.UNKNOWN_ADAPTER and request.accepted):
            if is_passing:
                self._status_time = 0.0  # it is not as ready as its last status says
            del self._requests[refused.id]
            request.reject(self, refused.id)
        else:
            request.refuse(_to_error(refused))

    def _find(self, id: int) -> EngineRequest | None:
        """Return a request by its id at the engine; None if there is none, maybe since its client has left."""
        request = self._requests.get(id)
        if request is None:
            self._losses.count_drop(self.name, DropReason.UNEXPECTED)
        return request

    def _send(self, message: Struct) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._lose("it does not read")
        if has_message(self._socket):  # and maybe the descriptor says so no more
            self._read_soon()

    def _lose(self, reason: str) -> None:
        """Have this connection end soon."""
        self._loss = reason
        self._check_due.set()

    def _take_requests(self) -> list[EngineRequest]:
        """Return the requests at the engine, and forget them."""
        requests = list(dict.fromkeys(self._requests.values()))
        self._requests = {}
        return requests


def _to_error(refused: Refused) -> QuireError:
    match refused.reason:
        case Refusal.QUEUE_FULL:
            return Overloaded(refused.detail, refused.retry_after)
        case Refusal.TOO_LONG:
            return InvalidRequest(refused.detail, "prompt")
        case Refusal.UNKNOWN_ADAPTER:
            return UnknownModel(refused.detail, "model")
        case _:
            return InvalidRequest(refused.detail)

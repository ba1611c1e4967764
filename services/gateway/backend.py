"""`Backend`: the engines of a gateway. It chooses an engine for each request.

A request stays at its engine as long as that lives. If the engine's worker dies, the request continues when the worker
is back. If the engine's scheduler dies, hangs or ends, or the connection to it does, the request goes to another
engine, or to the same one when it is back. Until then it waits here, for `loss_timeout` seconds at most. A new request
also waits if no engine is there. An engine that drains, or has no worker for some seconds, keeps its requests only if
no other is ready for them, or if their output would go on with other tokens there.

A request goes to an engine that has its adapter and whose context it fits; among those, a `Router` chooses.

Engines may come and go (`engine_discovery`). One that goes gets no new requests, and those that run there go on.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Unpack

import zmq

from services.gateway.engine_connection import EngineConnection
from services.gateway.engine_discovery import DISCOVERY_INTERVAL, Discovery, changes
from services.gateway.engine_request import EngineRequest, RequestOptions
from services.gateway.metrics import EngineLosses
from services.gateway.routing import Router, RoutingPolicy
from shared.curve import ConnectionKeys
from shared.errors import InvalidRequest, Overloaded, Unavailable
from shared.heartbeat import HEARTBEAT_INTERVAL, HeartbeatSender, LoopTimer, Watcher, supervisor_watcher
from shared.log_format import of_request
from shared.protocol import AdapterInfo, Sampling, Status, Welcome

__all__ = ["Backend", "EngineRequest"]

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Requests that may wait for an engine before new ones get status 429."""

TOO_MANY_WAIT = f"{MAX_WAITING} requests wait for an engine already"

WAIT_CHECK_INTERVAL = 0.25
"""Seconds between two checks for requests that have waited too long."""


class Backend:
    """Connects to engines, one for each address, for the time of an `async with` block.

    `engines` are addresses, or names and files where addresses are found. Raise `ConfigError` for an invalid one.
    `text_digest` identifies this gateway's tokenizer files; an engine with another digest gets no requests. Heartbeats
    tell the engines, and the supervisor at the address `supervisor` if there is one, that this gateway is alive. `keys`
    encrypt and authenticate connections over tcp; unless `protected`, by them or on purpose, no other host is allowed.
    """

    def __init__(
        self,
        engines: Sequence[str],
        text_digest: str = "",
        supervisor: str = "",
        *,
        loss_timeout: float = 60.0,
        routing_policy: RoutingPolicy = "cache_aware",
        keys: ConnectionKeys | None = None,
        protected: bool = True,
    ) -> None:
        self._discovery = Discovery(engines, protected=protected)
        self._text_digest = text_digest
        self._keys = keys
        self._context: zmq.Context[Any] = zmq.Context()
        self._connections: list[EngineConnection] = []
        self._router = Router(routing_policy)
        self._loop_timer = LoopTimer()
        self._supervisor = supervisor_watcher(supervisor, "gateway")
        self._heartbeats = HeartbeatSender(self._loop_timer, self._supervisor)
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._last_welcome: Welcome | None = None
        self._status_came = asyncio.Event()
        self._num_unanswered = 0  # requests that wait for the first `Welcome`
        self._loss_timeout = loss_timeout
        self._waiting: dict[EngineRequest, float] = {}  # requests with samples at no engine, and since when
        self._will_place = False  # whether `_place_waiting` is to run in the next turn of the event loop
        self._fingerprints: dict[EngineRequest, str] = {}  # of the engine that a running request was placed at first
        self.losses = EngineLosses()  # metrics of lost engines, and of what engines sent in vain

    async def __aenter__(self) -> "Backend":
        await self._tasks.__aenter__()
        self._connect(self._discovery.addresses)
        self._start(self._mark_turns())
        self._start(self._end_waits())
        if self._discovery.may_change:
            self._start(self._follow_discovery())
        self._heartbeats.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeats.__exit__()
        for task in self._running:
            task.cancel()
        try:
            if isinstance(error, asyncio.CancelledError):  # by the task group, if one of its tasks has crashed
                await self._tasks.__aexit__(kind, error, trace)
            else:  # the group would wrap any other error of the block in an exception group
                await self._tasks.__aexit__(None, None, None)
        finally:
            self._context.destroy(linger=0)

    @property
    def welcome(self) -> Welcome | None:
        """Return the `Welcome` of the connected engine with the longest context, the first of several.

        If none is connected, return the last one returned.
        """
        connected = (engine.welcome for engine in self._connections if engine.welcome)
        self._last_welcome = max(connected, key=lambda welcome: welcome.max_model_len, default=self._last_welcome)
        return self._last_welcome

    @property
    def unusable(self) -> str:
        """Return why none of the engines will ever get a request; empty if one may."""
        reasons = [engine.unusable for engine in self._connections]
        return reasons[0] if reasons and all(reasons) else ""

    async def first_welcome(self) -> Welcome:
        """Return `welcome` as soon as there is one.

        Raise `Unavailable` if none comes for `loss_timeout` seconds, or no engine will ever take a request, and
        `Overloaded` if too many wait.
        """
        if self.welcome is None and self._num_unanswered >= MAX_WAITING:
            raise Overloaded(TOO_MANY_WAIT, 1.0)
        self._num_unanswered += 1
        try:
            async with asyncio.timeout(self._loss_timeout):
                while (welcome := self.welcome) is None:
                    if self.unusable:
                        raise Unavailable(self.unusable)
                    self._status_came.clear()
                    await self._status_came.wait()
                return welcome
        except TimeoutError:
            raise Unavailable(f"no engine was ready {self._limit}") from None
        finally:
            self._num_unanswered -= 1

    def ready(self, count: int = 1) -> bool:
        """Return whether at least `count` engines can compute steps."""
        return sum(engine.ready for engine in self._connections) >= count

    def statuses(self) -> Mapping[str, Status]:
        """Return the last status of each connected engine by its name, or by its address where two names are equal."""
        statuses: dict[str, Status] = {}
        for engine in self._connections:
            if engine.welcome is not None and engine.status is not None:
                statuses[engine.address if engine.name in statuses else engine.name] = engine.status
        return statuses

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """Return the adapters that requests can name, by name. The engine that has one may have to be waited for."""
        return {name: adapter for engine in self._connections for name, adapter in engine.adapters.items()}

    async def add_adapter(self, name: str, path: str, *, replaces: bool) -> None:
        """Have each engine load an adapter, and return when all have.

        Raise `InvalidRequest` if an engine cannot, and `Unavailable` if one is not connected, or is lost before it
        answers. The others forget it then, unless it has replaced another.
        """
        engines = list(self._connections)
        answers = await asyncio.gather(
            *[engine.add_adapter(name, path, replaces=replaces) for engine in engines], return_exceptions=True
        )
        try:
            _check_answers(answers, "lora_path")
        except (InvalidRequest, Unavailable):
            if not replaces:
                loaded = [engine for engine, answer in zip(engines, answers, strict=True) if answer == ""]
                await asyncio.gather(*[engine.remove_adapter(name) for engine in loaded], return_exceptions=True)
            raise

    async def remove_adapter(self, name: str) -> None:
        """Let no new request name an adapter. Return when each engine that has it has answered, and raise likewise."""
        engines = [engine for engine in self._connections if name in engine.adapters]
        answers = [engine.remove_adapter(name) for engine in engines]
        _check_answers(await asyncio.gather(*answers, return_exceptions=True), "lora_name")

    async def reset_prefix_cache(self) -> None:
        """Have each engine forget its cached blocks, and return when all have.

        Raise `Unavailable` if an engine is not connected, or is lost before it answers.
        """
        await asyncio.gather(*[engine.reset_prefix_cache() for engine in self._connections])

    @asynccontextmanager
    async def submit(
        self, tokens: "array[int]", sampling: Sampling, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[EngineRequest]:
        """Run a request for the time of the block, as `begin` and `end` do."""
        request = self.begin(tokens, sampling, **options)
        try:
            yield request
        finally:
            self.end(request)

    def begin(self, tokens: "array[int]", sampling: Sampling, **options: Unpack[RequestOptions]) -> EngineRequest:
        """Submit a request, which runs until `end`. It goes to the engine of the one that it comes `after`.

        Raise `Unavailable` if no engine will ever take it, and `Overloaded` if too many wait for one.
        """
        after = options.get("after")
        if self.unusable and after is None:
            raise Unavailable(self.unusable)
        request = EngineRequest(
            tokens, sampling, **options, on_unplaced=self._wait_for_engine, on_first_token=self._note_computed
        )
        if (engine := self._choose(request, after=after)) is not None:
            self._place(request, engine)
        elif len(self._waiting) >= MAX_WAITING and not request.accepted:
            raise Overloaded(TOO_MANY_WAIT, 1.0)
        else:
            self._wait_for_engine(request)
        return request

    def end(self, request: EngineRequest) -> None:
        """Abort the unfinished samples of a request, and forget it."""
        self._waiting.pop(request, None)
        self._fingerprints.pop(request, None)
        self._note_computed(request)
        for connection in self._connections:
            connection.release(request)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _follow_discovery(self) -> None:
        while True:
            self._connect(await self._discovery.find())
            await asyncio.sleep(DISCOVERY_INTERVAL)

    def _connect(self, addresses: Sequence[str]) -> None:
        """Connect to the engines at new addresses, and let go of those whose addresses are not there any more."""
        added, removed = changes([engine.address for engine in self._connections], addresses)
        for engine in self._connections:
            engine.leaving = engine.address in removed
        for address in added:
            engine = EngineConnection(
                self._context,
                address,
                text_digest=self._text_digest,
                short_of_cpu=self._short_of_cpu,
                on_status=self._take_status,
                keys=self._keys,
                losses=self.losses,
            )
            self._connections.append(engine)
            self._start(self._run(engine))
        self._watch_connections()

    async def _run(self, engine: EngineConnection) -> None:
        await engine.run()
        self._connections.remove(engine)
        self._watch_connections()

    def _watch_connections(self) -> None:
        """Send heartbeats to the engines that are connected now."""
        watchers = [Watcher(engine.address, engine.registered_name, self._keys) for engine in self._connections]
        self._heartbeats.watchers = watchers + self._supervisor

    def _place(self, request: EngineRequest, engine: EngineConnection) -> None:
        fingerprint = engine.welcome.model.fingerprint if engine.welcome else ""
        if request.adapter in engine.adapters and not request.has_output:
            request.adapter_digest = engine.adapters[request.adapter].digest
        before = self._fingerprints.get(request)
        if before is None:
            self._fingerprints[request] = fingerprint
        elif request.accepted:
            self.losses.resumed.inc()
            exact = not request.has_output or fingerprint == before
            if not exact:
                self.losses.inexact.inc()
            logger.warning(
                "a request goes on at engine %s%s (losses without output between them: %d)",
                engine.name,
                "" if exact else ", which may compute other tokens",
                request.num_losses,
                extra=of_request(request.request_id),
            )
        engine.place(request)

    def _note_computed(self, request: EngineRequest) -> None:
        """Tell the router what the engines of a request have computed for it, if there is a choice of engines."""
        if len(self._connections) == 1:
            return
        for connection in self._connections:
            if request.attempts_at(connection):
                self._router.note(connection, request.prompt, request.outputs, request.cache_root)

    def _wait_for_engine(self, request: EngineRequest) -> None:
        """Keep a request until an engine is ready for it, maybe at once."""
        if request.waiting_since is None:  # otherwise an engine has refused it meanwhile
            request.waiting_since = time.monotonic()
        self._waiting[request] = request.waiting_since
        if not self._will_place:  # once for all that an engine's loss brings
            self._will_place = True
            asyncio.get_running_loop().call_soon(self._place_waiting)

    def _take_status(self, connection: EngineConnection) -> None:
        """Place what waits if the engine is ready; otherwise other engines may go on with what they are ready for."""
        self._status_came.set()
        if connection.ready:
            self._place_waiting()
        else:
            connection.hand_over(self._can_move)

    def _can_move(self, request: EngineRequest) -> bool:
        """Return whether other engines are ready for a request, and would go on with the same tokens."""
        models = [engine.welcome.model for engine in self._candidates(request, ready=True) if engine.welcome]
        same = any(model.fingerprint == self._fingerprints.get(request) for model in models)
        return same or (bool(models) and not request.has_output)

    def _place_waiting(self) -> None:
        """Submit the requests that wait, the first to arrive first, as far as an engine is ready."""
        self._will_place = False
        if not self.ready():
            return
        for request in sorted(self._waiting, key=lambda request: request.arrival):
            engine = self._choose(request, ready=True)
            if engine is None:
                continue
            del self._waiting[request]
            if not request.done and request.unplaced:
                self._place(request, engine)

    async def _end_waits(self) -> None:
        """Fail the requests that have waited too long, or wait in vain."""
        while True:
            await asyncio.sleep(WAIT_CHECK_INTERVAL)
            now, unusable = time.monotonic(), self.unusable
            for request, since in list(self._waiting.items()):
                if not unusable and now - since <= self._loss_timeout:
                    continue
                request.refuse(Unavailable(unusable or f"no engine was ready {self._limit}"))
                del self._waiting[request]

    @property
    def _limit(self) -> str:
        return f"for {self._loss_timeout:g} s (--engine-loss-timeout)"

    async def _mark_turns(self) -> None:
        """Mark the turns of the event loop, by which heartbeats show that it does not stand still."""
        while True:
            self._loop_timer.begin_turn()
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    def _short_of_cpu(self, now: float) -> bool:
        return self._heartbeats.short_of_cpu(now)

    def _choose(
        self, request: EngineRequest, *, ready: bool = False, after: EngineRequest | None = None
    ) -> EngineConnection | None:
        """Return the engine for a request, the last one of `after` if possible, or None if it has to wait for one."""
        candidates = self._candidates(request, ready=ready)
        if after is not None:
            candidates = [engine for engine in candidates if after.attempts_at(engine)] or candidates
        if not candidates:
            return None
        return self._router.choose(candidates, request.prompt, request.sampling, request.cache_root)

    def _has_adapter(self, engine: EngineConnection, request: EngineRequest) -> bool:
        """Return whether an engine has the adapter of a request: the same files, if there is output to continue."""
        if not request.adapter:
            return True
        if not engine.has_adapter(request.adapter):
            return False
        digest = request.adapter_digest if request.has_output else ""
        return digest in ("", engine.adapters[request.adapter].digest)

    def _candidates(self, request: EngineRequest, *, ready: bool) -> list[EngineConnection]:
        """Return the engines that compute steps, or else, unless they must be `ready`, those that queue requests.

        They have the request's adapter, and the request fits their context. If it fits none, a new request goes to the
        longest one, whose engine refuses it, and one that was accepted before waits. A request that was at an engine
        before goes to one that computes the same tokens, if such a one computes steps.
        """
        engines = [engine for engine in self._connections if self._has_adapter(engine, request)]
        accepting = {engine: engine.welcome for engine in engines if engine.welcome and not engine.draining}
        longest = max((welcome.max_model_len for welcome in accepting.values()), default=0)
        length = request.max_length if request.accepted else min(request.max_length, longest)
        candidates = [engine for engine, welcome in accepting.items() if length <= welcome.max_model_len]
        computing = [engine for engine in candidates if engine.ready]
        fingerprint = self._fingerprints.get(request)
        same = [engine for engine in computing if accepting[engine].model.fingerprint == fingerprint]
        return same or computing or ([] if ready else candidates)


def _check_answers(answers: Sequence[str | BaseException], field: str) -> None:
    """Raise what kept an engine from answering, or `InvalidRequest` if one has answered with an error."""
    if not answers:
        raise Unavailable("there is no engine")
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        if answer:
            raise InvalidRequest(answer, field)

"""The scheduler's loop: one thread that moves messages between sockets and the engine.

Each turn of the loop does the same things in the same order. Workers come first, since a device may be waiting. Then a
bounded number of gateways' messages is read, so that a burst of them cannot hold up the steps. Then plans are sent, and
only then progress goes to the gateways. The loop sleeps in `poll` and nowhere else, and never longer than `TICK`.

It is a loop of `poll`, and not asyncio, because a device waits for it: a message there and back takes 90 us between
blocking sockets, and 160 to 280 us if one side is asyncio. One thread that receives, decides and sends needs no locks
either.

The core keeps time by the monotonic clock. Only a request's arrival, which orders requests across gateways, is wall
clock.
"""

import logging
import time
from collections.abc import Collection, Sequence

import zmq
from msgspec.structs import replace

from services.scheduler.adapter_loads import AdapterLoads
from services.scheduler.config import SchedulerConfig, WorkerCapacity
from services.scheduler.engine import Engine
from services.scheduler.exporter import WorkerMetrics
from services.scheduler.gateways import AdapterRequest, GatewayRequest, Gateways, Reset
from services.scheduler.lora_modules import parse_lora_modules
from services.scheduler.throughput import Throughput
from services.scheduler.worker_group import WorkerResult
from services.scheduler.workers import WorkerAdapter, WorkerEvent, WorkerLost, WorkerReady, Workers
from shared.admin import DrainState
from shared.errors import ProtocolError
from shared.heartbeat import HeartbeatSender, LoopTimer, supervisor_watcher
from shared.liveness import STALL
from shared.log_format import of_requests
from shared.protocol import (
    Abort,
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    Refusal,
    Refused,
    Snapshot,
    Status,
    Submit,
)
from shared.transport import Listener

logger = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two `Status` messages, and the longest sleep. One more `Status` is sent before the last row of the
last unfinished request, so that the metrics include a request whose client has its answer."""

MAX_TURN_MESSAGES = 32
"""Maximum number of gateways' messages that are read in one turn, which takes about a millisecond."""

SPARE_WAIT = 1.0
"""Seconds for which a worker that was told to end goes on if no other waits in line. Services that are told to end
together hear of it one after the other, and an engine that drains needs its worker."""

FLOOD_CHECK_INTERVAL = 0.05
"""Minimum seconds between two checks for peers that send faster than the loop reads."""


NOT_STARTED = "the engine has not started yet"


class Service:
    """An engine behind two sockets. `run` returns after `stop`, when every message has left."""

    def __init__(self, config: SchedulerConfig, gateways: Listener, workers: Listener) -> None:
        self.engine: Engine | None = None  # made when the first worker has registered
        self.snapshot = Snapshot()  # replaced each tick; other threads may read it
        self.last_turn = time.monotonic()  # other threads may read it
        self.worker_metrics = WorkerMetrics(config.engine)
        self._config = config
        self._loop = LoopTimer()
        self._heartbeats = HeartbeatSender(self._loop, supervisor_watcher(config.supervisor_address, "scheduler"))
        self._gateways = Gateways(gateways, self._heartbeats.short_of_cpu)
        self._workers = Workers(workers, config.worker_timeout, self._heartbeats.short_of_cpu)
        self._adapter_loads = AdapterLoads(parse_lora_modules(config.lora_modules), self._gateways)
        self._told_adapters: list[AdapterInfo] = []  # that gateways know
        self._listeners = (gateways, workers)
        self._poller = zmq.Poller()
        for listener in (workers, gateways):
            self._poller.register(listener.socket, zmq.POLLIN)
            self._poller.register(listener.monitor.socket, zmq.POLLIN)
        self._drain_requested = False
        self._stop_calls = 0
        self._drain_deadline: float | None = None  # None until the loop has begun to drain
        self._drained = False
        self._last_tick = self.last_turn
        self._last_flood_check = 0.0
        self._throughput = Throughput(self.last_turn)
        self._was_idle = True  # whether no request was unfinished at the last turn

    @property
    def model(self) -> str:
        """The folder or name of the model; empty before the first worker has registered."""
        return "" if self.engine is None else self.engine.model.name

    @property
    def drain_state(self) -> DrainState:
        """Return how far the drain is. Another thread may ask."""
        return DrainState(self._drain_requested, self._drained, len(self._unfinished))

    def drain(self) -> None:
        """Have `run` take no new requests. Another thread may call it."""
        self._drain_requested = True

    def stop(self) -> None:
        """Have `run` drain and return; the second time, have it abort the rest. A signal handler may call it."""
        self._stop_calls += 1
        self.drain()

    def run(self) -> None:
        """Serve until stopped.

        Raise `ConfigError` if the first worker's memory is too small for the settings, or cannot load an adapter that
        they name.
        """
        with self._heartbeats:
            while not self._should_end(time.monotonic()):
                self._loop.begin_wait()
                self._poller.poll(int(TICK * 1000))
                self._loop.begin_turn()
                self._turn(time.monotonic())
            self._shut_down(time.monotonic())

    def _turn(self, now: float) -> None:
        self._make_up_for_standstill(now - self.last_turn)
        self.last_turn = now
        events = self._workers.receive(now)
        if self.engine is not None:
            self._advance(self.engine, events, now)
        requests = self._gateways.receive(MAX_TURN_MESSAGES, now)
        for request in requests:
            self._handle_request(request, now)
        self._cut_floods(now)
        self._release_worker(now)
        self._configure_worker(now)
        if requests and self.engine is not None:
            self._tell_adapters(self.engine)
            self._send_plans(self.engine, now)
        was_idle, self._was_idle = self._was_idle, not self._unfinished
        if self._was_idle:
            self.worker_metrics.note_idle()
        if now - self._last_tick >= TICK or (self._was_idle and not was_idle):
            self._tick(now)
        self._gateways.flush(now)
        for abort in self._gateways.take_orphans():
            self._handle_request(abort, now)

    @property
    def _unfinished(self) -> Collection[int]:
        return () if self.engine is None else self.engine.unfinished

    def _cut_floods(self, now: float) -> None:
        if now - self._last_flood_check >= FLOOD_CHECK_INTERVAL:
            self._last_flood_check = now
            for listener in self._listeners:
                listener.disconnect_floods()

    def _advance(self, engine: Engine, events: Sequence[WorkerEvent], now: float) -> None:
        """Apply what came from the worker, and send the steps that this makes possible."""
        for event in events:
            match event:
                case WorkerResult():
                    self._commit(engine, event, now)
                case WorkerReady():
                    self._adapter_loads.begin(engine)
                    self._welcome(engine, now)
                case WorkerAdapter(answer):
                    self._finish_load(engine, answer, now)
                case WorkerLost(out_of_memory, seconds):
                    self.worker_metrics.note_loss(seconds, now, busy=bool(engine.unfinished))
                    rows = engine.lose_worker(now, out_of_memory=out_of_memory)
                    self._gateways.deliver(rows, engine.unfinished)
                    self._tick(now)
        self._send_plans(engine, now)

    def _commit(self, engine: Engine, event: WorkerResult, now: float) -> None:
        try:
            rows = engine.commit(event.result, event.encoded)
        except ProtocolError as error:
            self._workers.give_up(str(error))
        else:
            self.worker_metrics.note_result(now)
            self._gateways.deliver(rows, engine.unfinished)

    def _finish_load(self, engine: Engine, answer: AdapterLoaded | AdapterRefused, now: float) -> None:
        was_starting = self._adapter_loads.starting
        self._gateways.deliver(self._adapter_loads.finish(engine, answer), engine.unfinished)
        if was_starting:
            self._welcome(engine, now)
        self._tell_adapters(engine)

    def _welcome(self, engine: Engine, now: float) -> None:
        """Tell gateways that the engine is ready, unless adapters of the start are not loaded yet."""
        if self._adapter_loads.starting or not self._workers.ready:
            return
        self._told_adapters = engine.adapters
        name, num_blocks, max_model_len = self._config.engine, engine.snapshot.blocks, engine.limits.max_model_len
        logger.info("engine %s is ready: %d blocks, max_model_len %d", name, num_blocks, max_model_len)
        self._gateways.welcome(engine.welcome)
        self._tick(now)

    def _tell_adapters(self, engine: Engine) -> None:
        """Tell gateways which adapters requests can name, if that has changed; then answer those who asked for it."""
        if not self._adapter_loads.starting and engine.adapters != self._told_adapters:
            self._told_adapters = engine.adapters
            self._gateways.welcome(engine.welcome)
        self._adapter_loads.answer()

    def _send_plans(self, engine: Engine, now: float) -> None:
        if self._may_release(engine, now):
            return
        while self._workers.ready:
            plan = engine.plan(now)
            for message in engine.take_adapter_messages():
                self._workers.send_adapter(message)
            if plan is None:
                return
            self._workers.send(plan, engine.encode(plan), now)

    def _handle_request(self, request: GatewayRequest, now: float) -> None:
        engine = self.engine
        if isinstance(request, Reset):
            if engine is not None:
                engine.reset_prefix_cache()
            self._gateways.confirm(request)
        elif isinstance(request, AdapterRequest):
            if engine is not None:
                self._adapter_loads.handle(engine, request)
            else:
                self._gateways.answer_adapter(request, NOT_STARTED)
        elif engine is None:
            if isinstance(request, Submit):
                self._gateways.refuse(Refused(request.id, Refusal.NOT_READY, NOT_STARTED))
        elif isinstance(request, Abort):
            self._gateways.deliver(engine.abort(request.id, request.sample), engine.unfinished)
        elif (refused := engine.submit(request, now)) is not None:
            self._gateways.refuse(refused)
        else:
            self._gateways.accept(request.id)

    def _may_release(self, engine: Engine, now: float) -> bool:
        """Return whether the active worker was told to end, and may do so before the requests have ended.

        They go on with the worker that waits in line, or with one that comes later. None may come any more if this
        engine drains, so they are finished first.
        """
        since = self._workers.leaving_since
        if since is None:
            return False
        if self._workers.has_spare or not engine.unfinished:
            return True
        return not self._drain_requested and now - since >= SPARE_WAIT

    def _release_worker(self, now: float) -> None:
        """End the epoch in good order if the active worker may end, and has answered every plan."""
        if self.engine is not None and self._workers.settled and self._may_release(self.engine, now):
            self.engine.end_epoch()
            self._workers.release()
            self._tick(now)

    def _configure_worker(self, now: float) -> None:
        """Begin an epoch if there is no active worker and one waits."""
        while (candidate := self._workers.candidate) is not None:
            engine = self.engine or self._start_engine(candidate)
            if reason := engine.mismatch(candidate):
                self._workers.dismiss(reason)
            else:
                self.worker_metrics.note_epoch()
                self._workers.configure(engine.configure(candidate), now)

    def _start_engine(self, worker: WorkerCapacity) -> Engine:
        self.engine = Engine(self._config, worker)
        if self._drain_deadline is not None:
            self.engine.drain()
        return self.engine

    def _tick(self, now: float) -> None:
        self._last_tick = now
        self._gateways.expire(now)
        snapshot = Snapshot() if self.engine is None else self.engine.snapshot
        rate = self._throughput.rate(snapshot.generation_tokens, now)
        self.snapshot = replace(snapshot, tokens_per_second=rate)
        self.worker_metrics.note_registered(self._workers.num_registered)
        ready = self._workers.progressing(now)
        self._gateways.status(Status(ready, self._drain_requested, self.snapshot, self._heartbeats.stats))

    def _make_up_for_standstill(self, seconds: float) -> None:
        """Give peers more time if this loop stood still, since it could not read their messages."""
        if seconds > TICK + STALL:
            logger.warning("the scheduler stood still for %.1f s", seconds)
            self._workers.postpone(seconds)
            self._gateways.postpone(seconds)

    def _should_end(self, now: float) -> bool:
        """Drain if asked to. Return whether to end: after `stop`, once that is done, out of time or cut short."""
        if not self._drain_requested:
            return False
        if self._drain_deadline is None:
            self._drain_deadline = now + self._config.drain_timeout
            self._begin_drain(now)
        self._drained = not self._unfinished and self._gateways.flushed
        return self._stop_calls > 1 or (self._stop_calls > 0 and (self._drained or now >= self._drain_deadline))

    def _begin_drain(self, now: float) -> None:
        logger.info("draining: %d requests are unfinished", len(self._unfinished))
        if self.engine is not None:
            self.engine.drain()
        self._tick(now)

    def _shut_down(self, now: float) -> None:
        if self.engine is not None and self.engine.unfinished:
            request_ids = self.engine.request_ids.values()
            logger.warning("aborting %d unfinished requests", len(request_ids), extra=of_requests(request_ids))
            for id in list(self.engine.unfinished):
                self._gateways.deliver(self.engine.abort(id), self.engine.unfinished)
        self._gateways.flush(now)
        if self.engine is not None:
            self.engine.end_record()

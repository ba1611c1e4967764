"""The scheduler's loop: one thread that moves messages between sockets and the core.

Everything happens in `_turn`, in this order: workers first, since a device may be waiting; then a bounded number of
messages of gateways, so that a burst of them cannot hold up the steps; then plans are sent, and only after them the
news that gateways get. The loop sleeps in `poll` and nowhere else, and never for longer than `TICK`.

The core keeps time by the monotonic clock; only the arrival of requests, which orders them across gateways, is wall
clock.
"""

import logging
import time

import msgspec
import zmq

from services.scheduler.config import SchedulerConfig
from services.scheduler.engine import Engine
from services.scheduler.gateways import Gateways
from services.scheduler.throughput import Throughput
from services.scheduler.workers import Lost, Ready, Workers
from shared.errors import ProtocolError
from shared.heartbeat import HeartbeatSender, LoopTimer, supervisor_watcher
from shared.liveness import STALL
from shared.protocol import Abort, Snapshot, Status, StepResult, Submit
from shared.transport import Listener

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two `Status` messages, and the longest sleep. One more comes before the last news of the last
unfinished request, so that whoever has its answer finds it in the figures."""

MESSAGES = 32
"""Messages of gateways that are read in one turn: about a millisecond's work."""

CUT = 0.05
"""Seconds between two looks for peers that send more than is read, at least."""


class Service:
    """One engine. `run` returns when it was told to stop and everything has been said."""

    def __init__(self, config: SchedulerConfig, gateways: Listener, workers: Listener) -> None:
        self.engine = Engine(config)
        self.snapshot = Snapshot()  # renewed each tick; other threads may read it
        self._config = config
        self._loop = LoopTimer()
        self._heartbeats = HeartbeatSender(self._loop, supervisor_watcher(config.supervisor_address, "scheduler"))
        self._gateways = Gateways(gateways, self._heartbeats.short_of_cpu)
        self._workers = Workers(workers, config.worker_timeout, self._heartbeats.short_of_cpu)
        self._listeners = (gateways, workers)
        self._cut = 0.0  # when floods were last looked for
        self._poller = zmq.Poller()
        for listener in (workers, gateways):
            self._poller.register(listener.socket, zmq.POLLIN)
            self._poller.register(listener.monitor.socket, zmq.POLLIN)
        self._stops = 0  # how often `stop` was called
        self._drained_at: float | None = None  # when waiting for running requests ends
        self.turned = self._ticked = time.monotonic()  # when the loop did so last; other threads may read it
        self._throughput = Throughput(self.turned)
        self._rests = True  # no request was unfinished at the last turn

    def stop(self) -> None:
        """Begin to drain; the second time, abort what is left. Meant for signal handlers: `run` does the work."""
        self._stops += 1

    def run(self) -> None:
        """Serve until stopped. Raises `ConfigError` if the first worker's memory is too small for what was asked."""
        with self._heartbeats:
            while not self._over(time.monotonic()):
                self._loop.begin_wait()
                self._poller.poll(int(TICK * 1000))
                self._loop.begin_turn()
                self._turn(time.monotonic())
            self._finish(time.monotonic())

    def _turn(self, now: float) -> None:
        self._forgive(now - self.turned)
        self.turned = now
        for news in self._workers.receive(now):
            self._settle(news, now)
        self._plan(now)
        for request in self._gateways.receive(MESSAGES, now):
            self._serve(request, now)
        self._cut_floods(now)
        self._configure(now)
        self._plan(now)
        rested, self._rests = self._rests, self.engine.idle
        if now - self._ticked >= TICK or (self._rests and not rested):
            self._tick(now)
        self._gateways.flush(now)
        for abort in self._gateways.orphans():
            self._serve(abort, now)

    def _cut_floods(self, now: float) -> None:
        if now - self._cut >= CUT:
            self._cut = now
            for listener in self._listeners:
                listener.disconnect_floods()

    def _settle(self, news: StepResult | Ready | Lost, now: float) -> None:
        match news:
            case StepResult():
                try:
                    self._gateways.deliver(self.engine.commit(news))
                except ProtocolError as error:
                    self._workers.give_up(str(error))
            case Ready():
                self._announce(now)
            case Lost():
                self._gateways.deliver(self.engine.lose_worker(now))
                self._tick(now)

    def _serve(self, request: Submit | Abort, now: float) -> None:
        if isinstance(request, Abort):
            self._gateways.deliver(self.engine.abort(request.id, request.sample))
        elif (refused := self.engine.submit(request, now)) is not None:
            self._gateways.refuse(refused)
        else:
            self._gateways.accept(request.id)

    def _plan(self, now: float) -> None:
        while self._workers.ready and (plan := self.engine.plan(now)) is not None:
            self._workers.send(plan, now)

    def _configure(self, now: float) -> None:
        """Begin an epoch if the engine has no worker and one waits."""
        while (candidate := self._workers.candidate) is not None:
            if reason := self.engine.unsuitable(candidate):
                self._workers.dismiss(reason)
            else:
                self._workers.configure(self.engine.configure(candidate), now)

    def _announce(self, now: float) -> None:
        welcome = self.engine.welcome()
        if welcome is not None:
            name, blocks, length = self._config.engine, self.engine.snapshot.blocks, welcome.max_model_len
            log.info("engine %s is ready: %d blocks, max_model_len %d", name, blocks, length)
            self._gateways.welcome(welcome)
        self._tick(now)

    def _tick(self, now: float) -> None:
        self._ticked = now
        self._gateways.expire(now)
        found = self.engine.snapshot
        rate = self._throughput.rate(found.generation_tokens, now)
        self.snapshot = msgspec.structs.replace(found, tokens_per_second=rate)
        ready = self._workers.progressing(now)
        self._gateways.status(Status(ready, self._stops > 0, self.snapshot, self._heartbeats.stats))

    def _forgive(self, seconds: float) -> None:
        if seconds > TICK + STALL:
            log.warning("the scheduler stood still for %.1f s", seconds)
            self._workers.forgive(seconds)
            self._gateways.forgive(seconds)

    def _over(self, now: float) -> bool:
        """Whether to end: told to stop, and all is done, or time or patience are up."""
        if not self._stops:
            return False
        if self._drained_at is None:
            log.info("draining: %d requests are unfinished", len(self._gateways.unfinished))
            self.engine.drain()
            self._drained_at = now + self._config.drain_timeout
            self._tick(now)
        done = self.engine.idle and self._gateways.flushed
        return done or self._stops > 1 or now >= self._drained_at

    def _finish(self, now: float) -> None:
        unfinished = self._gateways.unfinished
        if unfinished:
            log.warning("aborting %d unfinished requests", len(unfinished))
        for id in unfinished:
            self._gateways.deliver(self.engine.abort(id, -1))
        self._gateways.flush(now)
        self._workers.stop()

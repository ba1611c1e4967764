"""A gateway, its engines and their clients in one thread: `Backend` and `Gateways` over simulated sockets.

Real are the gateway's `Backend`, `EngineConnection` and `EngineRequest`, the wire, the scheduler's `Gateways` and its
core. Simulated are the sockets, the clock, the workers, and the two loops that poll sockets
(`EngineConnection._receive` and `Service`).
"""

import asyncio
import itertools
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
from simulated_engine import Client, SimulatedEngine, sampling_of
from simulated_sockets import Link, Network, SimulatedListener
from simulated_worker import expected_output

from services.gateway import backend, engine_connection, engine_request
from services.gateway.backend import Backend
from services.gateway.engine_connection import EngineConnection
from services.gateway.engine_request import EngineRequest
from services.scheduler import gateways
from services.scheduler.core import Limits
from services.scheduler.core.sequence import Sequence
from services.scheduler.gateways import Gateways, Reset
from shared.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable
from shared.protocol import (
    VERSION,
    Accepted,
    FinishReason,
    Heartbeat,
    ModelInfo,
    ProcessStats,
    Progress,
    ProgressRow,
    Refusal,
    Refused,
    Sampling,
    Snapshot,
    Status,
    Submit,
    Suspicion,
    Welcome,
    decode_from_gateway,
    decode_submit_id,
    decode_to_gateway,
    encode,
    unpack_tokens,
)

ANSWERS = (Accepted, Refused, Progress)
"""The messages about requests."""


ENDS = {"ready for 60 s": "given up", "engines in a row were lost": "lost too often"}
"""Outcomes by what the errors say."""


class Clock:
    """The time of all processes, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class NoHeartbeats:
    """A process that is never short of CPU, in place of `HeartbeatSender`."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def short_of_cpu(self, now: float) -> bool:
        return False


class SimulatedConnection(EngineConnection):
    """A connection that reads when it is told to. Answers of a lost connection come late, by the next one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.link: Link | None = None
        self.num_losses = 0
        self._late_answers: list[bytes] = []
        self.on_submit: Callable[[Submit], None] = lambda submit: None
        self.on_news: Callable[[EngineRequest, ProgressRow], None] = lambda request, row: None
        self._lost: asyncio.Future[str]

    def _send(self, message: Any) -> None:
        if isinstance(message, Submit):
            self.on_submit(message)
        super()._send(message)

    def _handle(self, message: Any) -> None:
        if isinstance(message, Progress):
            for row in message.rows:
                if row.scheduling is not None and row.id in self._requests:
                    self.on_news(self._requests[row.id], row)
        super()._handle(message)

    async def _receive(self, socket: Any, monitor: Any) -> str:
        if self.link is not None:  # ZeroMQ drops these messages, but the ids alone must be enough
            late = [body for body in self.link.to_gateway if isinstance(decode_to_gateway(body), ANSWERS)]
            self._late_answers += late
        self.link, self._lost = socket, asyncio.get_running_loop().create_future()
        return await self._lost

    def read(self, count: int, now: float) -> None:
        """Read at most `count` messages, and see if the connection has ended behind them or the engine is overdue."""
        link: Any = self.link
        if link is None or self._lost.done():
            return
        if self.ready:  # so that requests may have been placed again
            link.to_gateway.extend(self._late_answers)
            self._late_answers = []
        link.readable = count
        self._read()
        link.readable = 0
        if not link.attached:
            self._liveness.note_message(now)
        if link.closed_by_scheduler and not link.to_gateway:
            self.lose("its connection ended")
        elif reason := self._loss_reason(now, 0.0):
            self.lose(reason)

    def lose(self, reason: str) -> None:
        """Give up the engine, dead or alive, with all that it has sent and that is not read."""
        if not self._lost.done():
            self.num_losses += 1
            self._lost.set_result(reason)

    def send_heartbeat(self) -> None:
        """Do what `HeartbeatSender` does over a socket of its own."""
        if self.link is not None and (name := self.registered_name()):
            self.link.send(encode(Heartbeat(name, ProcessStats())), 1)


class SimulatedScheduler:
    """A scheduler process, which can die and boot again. It takes turns as `Service` does."""

    def __init__(
        self, address: str, limits: Limits, network: Network, clock: Clock, rng: Random, poison: dict[int, int]
    ) -> None:
        self.address = address
        self.limits = limits
        self.poison = poison  # as in `SimulatedEngine`
        self.engine: SimulatedEngine | None = None  # made when the first worker comes
        self.up = self.draining = False
        self.boots = 0
        self.num_resets = 0  # of the prefix cache
        self.deaths: Counter[str] = Counter()  # what the sequences were doing that a death has hit
        self.high_water = rng.choice([1, 3, 1000])
        self._network, self._clock, self._rng = network, clock, rng
        self.boot()

    @property
    def ready(self) -> bool:
        return self.engine is not None and self.engine.worker is not None

    @property
    def drained(self) -> bool:
        """Whether it has drained, and can end."""
        idle = self.engine is None or self.engine.core.idle
        return self.up and self.draining and idle and self.gateways.flushed

    def boot(self) -> None:
        """Start a process that knows nothing."""
        self.up = True
        self.boots += 1
        self.listener = SimulatedListener(self._rng, self.high_water)
        listener: Any = self.listener
        self.gateways = Gateways(listener, lambda now: False)
        self._network.listen(self.address, self.listener)

    def start_worker(self) -> None:
        """Let a worker register, the first one or another after a loss."""
        if self.engine is None:
            self.engine = SimulatedEngine(self.limits, on_rows=self._deliver)
            self.engine.now, self.engine.poison = self._clock.now, self.poison
            if self.draining:
                self.engine.core.drain()
        elif self.engine.worker is None:
            self.engine.begin_epoch()
        model = ModelInfo("model", "", "", 0, 0, "same")
        self.gateways.welcome(
            Welcome(VERSION, self.address, str(self.boots), model, self.limits.max_model_len, self.limits.max_num_seqs)
        )
        self.tick()

    def lose_worker(self) -> None:
        """Let the worker die. Call it only if `ready`."""
        assert self.engine is not None
        self.engine.lose_worker()
        self.tick()

    def die(self) -> None:
        """Lose everything, at once."""
        if self.engine is not None:
            for request in self.engine.core._queues.requests.values():
                self.deaths["with samples that have not started"] += bool(request.unstarted_samples)
                self.deaths.update(_doing(sequence) for sequence in request.unfinished.values())
            in_flight = self.engine.plans[len(self.engine.plans) - self.engine.core.in_flight :]
            self.deaths["with results on the way"] += bool(in_flight)
            self.deaths["forking"] += any(plan.forks for plan in in_flight)
        self._end(linger=False)

    def drain(self) -> None:
        """Begin to end."""
        self.draining = True
        if self.engine is not None:
            self.engine.core.drain()
        self.tick()

    def shut_down(self) -> None:
        """End, and hand back what is unfinished."""
        if self.engine is not None:
            for id in list(self.engine.core.unfinished):
                self.engine.abort(id)
                self.deaths["while draining"] += 1
        self.gateways.flush(self._clock.now)
        self._end(linger=True)

    def see_disconnects(self) -> None:
        """See which gateways have closed their connection."""
        for link in list(self.listener.links.values()):
            if link.closed_by_gateway:
                self.listener.detach(link)

    def reads_part(self) -> bool:
        """Read on up to the middle of a resubmission of several samples, if there is one."""
        for link in self.listener.links.values():
            waiting = list(link.to_scheduler)
            for count, (first, second) in enumerate(itertools.pairwise(waiting), 1):
                if _seed(first) is not None and _seed(first) == _seed(second):
                    link.to_scheduler = deque(waiting[:count])
                    self.turn(deliver=False, max_messages=32, plan=False)
                    link.to_scheduler.extend(waiting[count:])
                    return True
        return False

    def tick(self) -> None:
        """Send a status."""
        snapshot = Snapshot() if self.engine is None else self.engine.core.snapshot()
        self.gateways.status(Status(self.ready, self.draining, snapshot))

    def turn(self, *, deliver: bool, max_messages: int, plan: bool) -> None:
        """Take one turn of the loop."""
        now = self._clock.now
        if self.engine is not None:
            self.engine.now = now
            if deliver and self.engine.results:
                self.engine.deliver()
        for request in self.gateways.receive(max_messages, now):
            self._handle(request)
        if plan and self.engine is not None and self.engine.worker is not None:
            self.engine.plan()
            if self.engine.worker is None:
                self.deaths["killed by a request"] += 1
                self.tick()
        self.gateways.flush(now)
        for abort in self.gateways.take_orphans():
            self._handle(abort)

    def check_finished(self) -> None:
        """Check that nothing is left of any request."""
        assert self.engine is not None
        self.engine.check_finished()
        assert not self.gateways._origins, "ids are forgotten"
        assert not any(gateway.ids for gateway in self.gateways._gateways.values())

    def _end(self, *, linger: bool) -> None:
        self.up, self.draining, self.engine = False, False, None
        self._network.close(self.address, linger=linger)

    def _handle(self, request: Any) -> None:
        if isinstance(request, Reset):
            if self.engine is not None:
                self.engine.reset_prefix_cache()
            self.num_resets += 1
            self.gateways.confirm(request)
        elif self.engine is None:
            if isinstance(request, Submit):
                self.gateways.refuse(Refused(request.id, Refusal.NOT_READY, ""))
        elif not isinstance(request, Submit):
            self.engine.abort(request.id, request.sample)
        elif (refused := self.engine.submit_request(request)) is not None:
            self.gateways.refuse(refused)
        else:
            self.gateways.accept(request.id)

    def _deliver(self, rows: list[ProgressRow]) -> None:
        assert self.engine is not None
        self.gateways.deliver(rows, self.engine.core.unfinished)


class GatewayClient:
    """The client of one request: it compares each sample with the output that it has alone.

    `stops` are the output lengths at which it aborts a sample, as a stop string does.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        n: int,
        stops: dict[int, int],
        waits: bool,
        salt: str,
        **options: int,
    ) -> None:
        self.samples = {
            sample: Client(
                expected_output(prompt, len(prompt), sampling_of(sampling, sample), sample, salt), [], len(prompt)
            )
            for sample in range(n)
        }
        self.promised = False  # an engine has accepted the request
        self.suspicions: dict[int, Suspicion] = {}  # by sample, as engines have told the gateway
        self.outcome = "left"  # how it ended
        self.request: EngineRequest | None = None
        self.seed = sampling.seed  # unlike that of any other client
        self.work = n * (len(prompt) + sampling.max_tokens + 1)
        self._tokens, self._sampling, self._n = array("i", prompt), sampling, n
        self._salt, self._options = salt, options
        self._stops, self._waits = stops, waits

    async def run(self, backend: Backend) -> None:
        """Run the request to its end, like a handler of the API."""
        try:
            submission = backend.submit(self._tokens, self._sampling, n=self._n, cache_salt=self._salt, **self._options)
            async with submission as self.request:
                if self._waits:
                    await self.request.wait_accepted()
                    self.promised = True
                while unfinished := [sample for sample in self.samples if not self._ended(sample)]:
                    for row in await self.request.rows():
                        assert row.sample in unfinished, "nothing comes for a sample that has ended"
                        self._receive(self.request, row)
        except Overloaded:
            assert not self.promised, "a request that was accepted is not refused for load"
            self.outcome = "refused"
        except InvalidRequest:
            assert not self.promised, "a request that was accepted fits"
            self.outcome = "too long"
        except (EngineFailure, Unavailable) as error:
            self.outcome = next((end for said, end in ENDS.items() if said in str(error)), f"failed: {error}")
        else:
            self.outcome = "served"

    def check_submit(self, submit: Submit) -> int:
        """Check that nothing is computed twice. Return the number of engines that the request is at."""
        tokens, client = unpack_tokens(submit.tokens).tolist(), self.samples[submit.sample]
        assert not self._stopped(submit.sample), "an aborted sample is not computed again"
        known = self._tokens.tolist() + client.output
        assert tokens[: len(known)] == known, "no output is computed again"
        if client.scores and client.scores == client.oracle.scores:
            assert submit.sampling.prompt_logprobs < 0, "no prompt is scored again"
        samples = range(submit.sample, submit.sample + submit.n)
        known = [self.suspicions.get(sample, Suspicion()) for sample in samples]
        gravest = max(known, key=lambda suspicion: (suspicion.deaths_alone, suspicion.cleared_at))
        assert submit.suspicion == gravest, "it is a suspect where it was one before"
        attempts = [] if self.request is None else self.request._attempts
        assert sum(submit.sample in attempt.samples for attempt in attempts) <= 1, "a sample runs at one engine"
        return len({attempt.engine.name for attempt in attempts if attempt.samples})

    def _receive(self, request: EngineRequest, row: ProgressRow) -> None:
        self.promised = True
        assert row.tokens or row.prompt_logprobs or row.finish_reason, "the reader is not woken for nothing"
        assert row.scheduling is None or row.scheduling.suspicion == Suspicion(), "suspicions are for engines"
        client = self.samples[row.sample]
        if self._stopped(row.sample):
            return
        assert row.finish_reason is not FinishReason.ABORT, "the gateway hears of an engine's end, its clients do not"
        client.receive(row, 0)
        if self._stopped(row.sample):
            request.abort(row.sample)

    def _stopped(self, sample: int) -> bool:
        return len(self.samples[sample].output) >= self._stops.get(sample, 1 << 30)

    def _ended(self, sample: int) -> bool:
        return self.samples[sample].finish_reason is not None or self._stopped(sample)


def _doing(sequence: Sequence) -> str:
    if sequence.output_len:
        last = len(sequence.tokens) == sequence.progress.max_num_tokens - 1
        return "at the last token" if last else "decoding"
    return "in prefill" if sequence.progress.in_flight or sequence.progress.num_computed else "queued"


def _seed(body: bytes) -> int | None:
    """Return the seed of a `Submit`, None for another message."""
    message = None if decode_submit_id(body) is None else decode_from_gateway(body)
    return message.sampling.seed if isinstance(message, Submit) else None


@contextmanager
def simulated(network: Network, clock: Clock) -> Iterator[None]:
    """Replace sockets, clock and heartbeats of gateway and scheduler for the time of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (backend, engine_connection, engine_request, gateways):
            patch.setattr(module, "time", clock)
        patch.setattr(engine_connection, "connect", network.connect)
        patch.setattr(engine_connection, "RECONNECT_DELAY", 0)
        patch.setattr(backend, "EngineConnection", SimulatedConnection)
        patch.setattr(backend, "HeartbeatSender", NoHeartbeats)
        patch.setattr(backend, "WAIT_CHECK_INTERVAL", 0)
        yield

"""Tests of `Backend` and `EngineConnection`, with fake engines or none."""

import asyncio
import errno
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from services.gateway import backend as backend_module
from services.gateway import engine_connection
from services.gateway.backend import Backend, EngineRequest
from services.gateway.engine_connection import EngineConnection
from services.gateway.metrics import EngineLosses
from services.gateway.routing import Router
from shared.errors import Overloaded
from shared.protocol import (
    VERSION,
    AdapterInfo,
    ModelInfo,
    ProgressRow,
    Sampling,
    Snapshot,
    Status,
    Submit,
    Welcome,
    encode,
    pack_tokens,
)
from shared.transport import DropReason, Message, listen
from tests.waiting import PATIENCE, until

PROMPT = array("i", [1, 2, 3])
SAMPLING = Sampling(max_tokens=9, seed=4)
NOWHERE = "ipc://@quire-test-nobody-listens-here"


class FakeEngine:
    """An engine that is ready, of a model with a fingerprint. A test makes it drain."""

    unusable = ""
    load = 0

    def __init__(
        self, name: str, fingerprint: str = "f", max_model_len: int = 100, adapters: Sequence[AdapterInfo] = ()
    ) -> None:
        self.name = self.address = name
        model = ModelInfo("", "", "", 0, 0, fingerprint)
        self.adapters = {adapter.name: adapter for adapter in adapters}
        self.welcome = Welcome(VERSION, name, "1", model, max_model_len, 8, list(adapters))
        self.ready, self.draining = True, False
        self.requests: list[EngineRequest] = []
        self.submits: list[Submit] = []
        self._ids = itertools.count()

    def has_adapter(self, name: str) -> bool:
        return name in self.adapters

    @property
    def status(self) -> Status:
        return Status(self.ready, self.draining, Snapshot())

    def place(self, request: EngineRequest) -> None:
        self.submits += request.place(self, self._ids)
        self.requests.append(request)

    def release(self, request: EngineRequest) -> None: ...

    def abort(self, id: int, sample: int = -1) -> None: ...

    def hand_over(self, may_move: Callable[[EngineRequest], bool]) -> None:
        for request in filter(may_move, list(self.requests)):
            self.requests.remove(request)
            request.leave(self, "it drains")

    def drain(self, backend: Backend) -> None:
        self.ready, self.draining = False, True
        backend._take_status(cast(Any, self))


@contextmanager
def backend_of(*engines: FakeEngine) -> Iterator[Backend]:
    """Yield a backend that has these engines, and runs no tasks."""
    backend = Backend([])
    backend._context.destroy()
    backend._connections = cast(Any, list(engines))
    yield backend


async def test_an_engine_that_cannot_be_connected_to_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    connect, opened = engine_connection.connect, []

    @contextmanager
    def fail_for_some(context: Any, address: str, *args: Any) -> Any:
        opened.append(address)
        if address == f"{NOWHERE}-2":
            raise zmq.ZMQError(errno.EMFILE)
        with connect(context, address, *args) as connection:
            yield connection

    monkeypatch.setattr(engine_connection, "connect", fail_for_some)
    async with Backend([f"{NOWHERE}-1", f"{NOWHERE}-2"]) as backend:
        await until(lambda: opened.count(f"{NOWHERE}-2") >= 3)
        assert opened.count(f"{NOWHERE}-1") == 1
        assert len(backend._connections) == 2
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"no connection to the engine at {NOWHERE}-2: Too many open files"]


@pytest.mark.parametrize(
    ("fingerprint", "has_output", "moves"), [("f", True, True), ("other", False, True), ("other", True, False)]
)
async def test_a_drain_moves_no_output_to_an_engine_that_computes_other_tokens(
    fingerprint: str, has_output: bool, moves: bool
) -> None:
    first, second = FakeEngine("0"), FakeEngine("1", fingerprint)
    second.ready = False
    with backend_of(first, second) as backend:
        async with backend.submit(PROMPT, SAMPLING) as request:
            request.accept()
            if has_output:
                request.add(ProgressRow(0, 0, 0, [7]))
            second.ready = True
            first.drain(backend)
            await asyncio.sleep(0)
            assert [engine.requests for engine in (first, second)] == ([[], [request]] if moves else [[request], []])
            first.requests.clear()
            backend._connections.pop(0)
            request.lose(first)
            await asyncio.sleep(0)
            assert request.engine == "1", "when the engine ends, it goes on anyway"


async def test_a_request_that_no_engine_can_take_delays_no_other() -> None:
    long, short = FakeEngine("0"), FakeEngine("1", max_model_len=12)
    with backend_of(long, short) as backend:
        async with backend.submit(PROMPT, Sampling(max_tokens=10, seed=4)) as stuck:
            stuck.accept()
            backend._connections.pop(0)
            stuck.lose(long)
            await asyncio.sleep(0)
            assert stuck.unplaced, "it does not fit"
            async with backend.submit(PROMPT, SAMPLING) as request:
                short.requests.clear()
                request.lose(short)
                await asyncio.sleep(0)
                assert short.requests == [request]
                assert stuck.unplaced


async def test_with_one_engine_nothing_is_noted_for_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(Router, "note", lambda self, engine, *_: noted.append(engine))
    first, second = FakeEngine("0"), FakeEngine("1")
    for engines in ([first], [first, second]):
        with backend_of(*engines) as backend:
            async with backend.submit(PROMPT, SAMPLING) as request:
                request.add(ProgressRow(0, 0, 0, [7]))
    assert noted == [first, first], "at the first token and at the end"


async def test_an_engine_shows_zeros_once_it_is_known() -> None:
    losses = EngineLosses()
    with zmq.Context() as context:
        engine = connection(context, losses)
        assert not list(losses.dropped.collect()[0].samples)
        engine._handle(FakeEngine("0").welcome)
    found = [sample for sample in losses.dropped.collect()[0].samples if sample.name == "quire:dropped_messages_total"]
    assert {sample.labels["reason"] for sample in found} == {reason.value for reason in DropReason}
    assert {(sample.labels["engine"], sample.value) for sample in found} == {("0", 0.0)}


@pytest.mark.parametrize("was_there", [True, False])
async def test_only_an_engine_that_was_there_can_be_lost(was_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What never said who it is has no name, and its address is none."""
    losses = EngineLosses()

    async def receive(self: EngineConnection, *_: Any) -> str:
        if was_there:
            self._handle(FakeEngine("0").welcome)
        return "its connection ended"

    monkeypatch.setattr(EngineConnection, "_receive", receive)
    with zmq.Context() as context:
        await connection(context, losses)._run_connection()
    counts = [one for one in losses.detection.collect()[0].samples if one.name.endswith("_count")]
    assert [(one.labels, one.value) for one in counts] == ([({"engine": "0"}, 1.0)] if was_there else [])


async def test_what_came_before_a_send_is_read_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A send may take the signal that something has come, for which the event loop waits."""
    monkeypatch.setattr(engine_connection, "CHECK_INTERVAL", 2 * PATIENCE)  # which would read it as well
    address = f"ipc://{tmp_path}/engine.sock"
    with zmq.Context() as context, listen(context, address) as listener:
        engine = connection(context, EngineLosses(), address)
        running = asyncio.create_task(engine.run())
        hellos: list[Message] = []
        await until(lambda: bool(hellos) or bool(hellos.extend(filter(None, [listener.receive()]))))
        listener.send(hellos[0].peer, encode(FakeEngine("0").welcome))
        await until(lambda: engine.welcome is not None)
        listener.send(hellos[0].peer, encode(Status(True, False, Snapshot())))
        time.sleep(0.1)  # noqa: ASYNC251  (the loop must not run before the send)
        engine.abort(1)
        await until(lambda: engine.status is not None)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def connection(context: "zmq.Context[Any]", losses: EngineLosses, address: str = NOWHERE) -> EngineConnection:
    return EngineConnection(
        context,
        address,
        text_digest="",
        short_of_cpu=lambda now: False,
        on_status=lambda connection: None,
        keys=None,
        losses=losses,
    )


async def test_a_later_part_of_a_request_goes_to_the_engine_of_the_earlier_one() -> None:
    """It keeps its place in the order, and is not counted as a request that lost its engine."""
    engines = FakeEngine("0"), FakeEngine("1")
    with backend_of(*engines) as backend:
        first = backend.begin(PROMPT, SAMPLING)
        first.accept()
        (home,) = [engine for engine in engines if engine.requests]
        home.load = 50  # a new request would go to the other one
        first.add(ProgressRow(0, 0, 0, [7]))
        backend.end(first)
        later = backend.begin(PROMPT, SAMPLING, output=array("i", [8]), after=first)
        assert home.requests == [first, later]
        assert (later.arrival, later.accepted, later.outputs) == (first.arrival, True, [array("i", [8])])
        submit = home.submits[-1]
        assert (submit.tokens, submit.prompt_len) == (pack_tokens([*PROMPT, 8]), len(PROMPT))
        assert (submit.resumed, submit.arrival) == (True, first.arrival)
        assert backend.losses.resumed._value.get() == 0
        home.ready, home.draining = False, True
        elsewhere = backend.begin(PROMPT, SAMPLING, after=later)
        assert elsewhere.engine != home.name


async def test_a_later_part_of_a_request_waits_though_too_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "MAX_WAITING", 0)
    engine = FakeEngine("0")
    with backend_of(engine) as backend:
        first = backend.begin(PROMPT, SAMPLING)
        backend._connections = []
        with pytest.raises(Overloaded):
            backend.begin(PROMPT, SAMPLING)
        later = backend.begin(PROMPT, SAMPLING, after=first)
        assert backend._waiting == {later: later.waiting_since}

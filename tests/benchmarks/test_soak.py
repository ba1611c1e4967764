"""Tests that a soak finds what is lost or leaked: its clients against servers that err, and its page."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from benchmarks.soak.answer import Answer
from benchmarks.soak.clients import Client, Manner
from benchmarks.soak.faults import Fault
from benchmarks.soak.processes import ProcessHistory, Sample
from benchmarks.soak.report import MIB, Measurement, Remains, failures, page
from benchmarks.soak.tally import Tally
from benchmarks.soak.workload import StreamRequest, make_requests

COMPLETION = StreamRequest("/v1/completions", {"prompt": "hello"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def piece(text: str, end: str | None = None, logprob: float = -1.0) -> dict[str, Any]:
    logprobs = {"token_logprobs": [logprob], "top_logprobs": [{"x": logprob}]}
    return {"choices": [{"index": 0, "text": text, "finish_reason": end, "logprobs": logprobs}], "usage": None}


def usage(count: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}}


WHOLE = [piece("one"), piece(" two", "length"), usage(2)]
ERROR = {"error": {"message": "the engine was lost", "code": 500}}


def answer(chunks: Sequence[dict[str, Any]]) -> Answer:
    result = Answer()
    for chunk in chunks:
        result.take(chunk)
    return result


def stream(chunks: Sequence[Any], *, breaks: bool = False, pause: float = 0.0) -> Handler:
    """Return a handler that writes `chunks`, and then [DONE] or nothing more on a broken connection."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(pause)
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"data: [DONE]\n\n")
        return response

    return handle


async def full(request: web.Request) -> web.StreamResponse:
    return web.Response(status=429, headers={"Retry-After": "0"})


@asynccontextmanager
async def serving(handlers: Sequence[Handler]) -> AsyncIterator[str]:
    """Answer the first requests by `handlers`, one each, and all further ones by the last."""
    rest = list(handlers)

    async def handle(request: web.Request) -> web.StreamResponse:
        return await (rest.pop(0) if len(rest) > 1 else rest[0])(request)

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


class Patient(Client):
    """A client that neither stalls nor leaves, unless told to, and hardly waits between two attempts."""

    manner = Manner()

    def _manner(self) -> Manner:
        return self.manner

    async def _wait(self, least: float, most: float) -> None:
        await asyncio.sleep(0.001)


async def ask_once(*handlers: Handler, gateway_died: bool = False, manner: Manner = Patient.manner) -> Tally:
    """Let a client ask for one stream, whose undisturbed answer is `WHOLE`."""
    tally, asked = Tally(), iter([False])
    async with serving(handlers) as url:
        client = Patient(
            url,
            [(COMPLETION, answer(WHOLE))],
            tally,
            lambda port, opened, *, responded: gateway_died and port > 0 and responded,
            lambda: next(asked, True),
            random.Random(0),
        )
        client.manner = manner
        await client.run()
    return tally


async def test_a_whole_stream_counts_with_its_tokens() -> None:
    tally = await ask_once(full, full, stream(WHOLE))
    assert (tally.ended, tally.tokens, tally.refused, tally.lost) == (1, 2, 2, [])


async def test_a_long_chunk_is_read_by_a_client_that_reads_little_ahead() -> None:
    (lost,) = (await ask_once(stream([piece("one" * 10_000), *WHOLE]))).lost
    assert "choice 0 is 'oneone" in lost


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([piece("one"), piece(" one"), piece(" two", "length"), usage(2)], "choice 0 is 'one one two' instead of"),
        ([piece("one"), piece(" two", "length"), usage(3)], "usage is (1, 3) instead of (1, 2)"),
        ([piece("one"), piece(" two", "length")], "usage is None"),
        ([piece("one"), piece(" two", "stop"), usage(2)], "ends with ['stop'] instead of ['length']"),
        ([*WHOLE, piece("", "length")], "ends with ['length', 'length'] instead of ['length']"),
        ([piece("one", logprob=-1.1), piece(" two", "length"), usage(2)], "choice 0 has other log-probabilities"),
        ([usage(2)], "choices are [] instead of [0]"),
        ([piece("one"), ERROR], "the engine was lost"),
    ],
)
async def test_a_stream_that_differs_is_lost(chunks: list[Any], reason: str) -> None:
    tally = await ask_once(stream(chunks))
    assert tally.ended == 0
    (lost,) = tally.lost
    assert reason in lost
    assert "hello" in lost  # which request it was


async def test_other_statuses_and_ends_without_done_are_lost() -> None:
    async def failing(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text="a bug")

    async def ending(request: web.Request) -> web.StreamResponse:
        return web.Response(text=f"data: {json.dumps(WHOLE[0])}\n\n")

    assert "status 500: a bug" in (await ask_once(failing)).lost[0]
    assert "without [DONE]" in (await ask_once(ending)).lost[0]


async def test_a_broken_connection_is_lost_unless_its_gateway_died() -> None:
    handlers = (stream(WHOLE[:1], breaks=True), stream(WHOLE))
    assert "its gateway was alive" in (await ask_once(*handlers)).lost[0]
    tally = await ask_once(*handlers, gateway_died=True)
    assert (tally.broken, tally.ended, tally.lost) == (1, 1, [])
    wrong = (stream([piece("two")], breaks=True), stream(WHOLE))
    assert "its beginning is" in (await ask_once(*wrong, gateway_died=True)).lost[0]


async def test_a_client_leaves_and_comes_back_or_stalls() -> None:
    tally = await ask_once(stream(WHOLE, pause=0.2), manner=Manner(leave_after=0.1))
    assert (tally.left, tally.ended, tally.lost) == (1, tally.came_back, [])
    tally = await ask_once(stream(WHOLE), manner=Manner(stall_after=1, stall_seconds=0.01))
    assert (tally.stalled, tally.ended) == (1, 1)
    slow = await ask_once(stream(WHOLE, pause=0.3))
    assert len(slow.pauses) == 2
    assert all(pause.ended - pause.began > 0.29 for pause in slow.pauses)


def test_only_connections_of_the_victim_or_in_its_queue_may_break() -> None:
    fault = Fault("gateway 1", "frozen", 100.0, frozenset({4001}), replaced=105.0)
    assert fault.broke(4001, 90.0, responded=True)
    assert not fault.broke(4002, 90.0, responded=True)
    assert fault.broke(4002, 103.0, responded=False)
    assert not fault.broke(4002, 103.0, responded=True)
    assert not fault.broke(4002, 106.0, responded=False)
    assert not Fault("worker 0", "killed", 100.0, replaced=101.0).broke(4002, 100.5, responded=False)


def samples(growth: float, seconds: int = 400, descriptors: int = 40) -> list[Sample]:
    """Return samples of a process that grows by 50 MiB in two minutes, and then by `growth` bytes a minute."""
    return [
        Sample(float(at), int(90 * MIB + MIB * 50 * min(at, 120) / 120 + growth * max(at - 120, 0) / 60), descriptors)
        for at in range(0, seconds, 2)
    ]


def measurement(**changes: Any) -> Measurement:
    """Return what is seen when all is well, with changes."""
    histories = [ProcessHistory("gateway 0", 1, samples(MIB)), ProcessHistory("worker 0", 2, samples(9 * MIB, 200))]
    fields: dict[str, Any] = {
        "seconds": 600.0,
        "clients": 32,
        "tally": Tally(ended=1, tokens=9),
        "faults": [Fault("gateway 0", "killed", 1.0, replaced=2.0)],
        "histories": histories,
        "before": {history.name: history.samples[0] for history in histories},
        "after": {history.name: history.samples[-1] for history in histories},
        "left": Remains(whole=True, running=0, waiting=0, blocks=0),
        "new_files": [],
        "tracebacks": 0,
    }
    return Measurement(**fields | changes)


def test_a_run_in_which_all_is_well_has_no_failures() -> None:
    assert failures(measurement()) == []
    text = page(measurement(), "make soak")
    assert "| gateway 0 | 1 | 90 | 145 | 1.00 | 40 | 40 |" in text
    assert "| gateway killed | 1 | 1.0 | - | - |" in text
    assert "Failures" not in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tally": Tally(ended=1, lost=["it ended"])}, "a stream was lost: it ended"),
        ({"tally": Tally()}, "no stream has ended"),
        ({"left": Remains(whole=False, running=0, waiting=0, blocks=0)}, "not every engine is ready at the end"),
        ({"left": Remains(whole=True, running=1, waiting=2, blocks=0)}, "1 sequences run and 2 wait at the end"),
        ({"left": Remains(whole=True, running=0, waiting=0, blocks=3)}, "3 blocks are not free at the end"),
        ({"new_files": ["a.db"]}, "files are left: a.db"),
        ({"tracebacks": 1}, "1 tracebacks in the log"),
        ({"exit_status": 1}, "the server's exit status is 1"),
        ({"faults": [Fault("worker 0", "frozen", 1.0)]}, "worker 0 was frozen and not replaced"),
        ({"after": {"gateway 1": Sample(9.0, 1, 41)}}, "gateway 1 has 41 file descriptors at rest; there were 40"),
        ({"histories": [ProcessHistory("worker 0", 7, samples(3 * MIB))]}, "worker 0 (process 7) grew by 3.0 MiB"),
    ],
)
def test_each_loss_and_leak_is_a_failure(changes: dict[str, Any], reason: str) -> None:
    (wrong,) = failures(measurement(**changes))
    assert reason in wrong
    assert reason in page(measurement(**changes), "make soak")


def test_requests_are_distinct_and_of_all_kinds() -> None:
    requests = make_requests(24, 0)
    assert requests == make_requests(24, 0)
    assert len({json.dumps(request) for request in requests}) == 24
    bodies = [request.body for request in requests]
    for field in ("stop", "seed", "min_tokens", "presence_penalty", "logprobs", "messages", "prompt"):
        assert any(field in body for body in bodies), field
    assert {body["n"] for body in bodies} == {1, 2, 3}

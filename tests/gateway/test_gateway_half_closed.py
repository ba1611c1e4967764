"""Tests of clients that shut down their sending side: they get their response, and those that left are noticed."""

import asyncio

import pytest

from services.gateway import http_server
from tests.gateway.fakes import FakeBackend, endless
from tests.gateway.raw_http import connect, get, listening, post
from tests.waiting import PATIENCE

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

STREAM = b'{"prompt":"hi","stream":true}'
WHOLE = b'{"prompt":"hi"}'
RESPONSES = [post(body=body, path="/v1/responses") for body in (b'{"input":"hi","stream":true}', b'{"input":"hi"}')]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("data", [get, post, lambda version: post(body=STREAM, version=version)])
async def test_who_still_listens_is_answered(data: object, version: str) -> None:
    """HTTP-03."""
    assert callable(data)
    async with listening() as port:
        for _ in range(10):
            async with connect(port, data(version=version)) as exchange:
                exchange.half_close()
                assert (await exchange.answer()).status == 200
                assert await exchange.ended()


async def test_pipelined_requests_are_all_answered() -> None:
    """HTTP-03."""
    data = get() + post() + post(body=STREAM) + get("/nowhere")
    async with listening() as port, connect(port, data) as exchange:
        exchange.half_close()
        assert [(await exchange.answer()).status for _ in range(4)] == [200, 200, 200, 404]
        assert await exchange.ended()


async def test_who_is_gone_after_having_listened_is_noticed_by_the_next_token() -> None:
    """HTTP-03."""
    backend = FakeBackend(endless, max_model_len=100_000)
    backend.pause_at = 1
    data = post(body=b'{"prompt":"hi","stream":true,"max_tokens":90000}')
    async with listening(backend) as port, connect(port, data) as exchange:
        await exchange.answer(to_head=True)
        exchange.half_close()
        await asyncio.sleep(2 * http_server.PROBE_AFTER)
        exchange.leave()
        backend.go_on.set()
        await asyncio.wait_for(backend.requests[0].left.wait(), PATIENCE)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_slow_stream_goes_on_to_its_end(version: str, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP-03: clients skip the bytes by which the gateway probes them."""
    monkeypatch.setattr(http_server, "PROBE_AFTER", 0.02)
    backend = FakeBackend()
    backend.pause_at = int(begun)
    async with listening(backend) as port, connect(port, post(body=STREAM, version=version)) as exchange:
        await backend.submitted.wait()
        exchange.half_close()
        await asyncio.sleep(0.4)  # longer than the time before a probe
        backend.go_on.set()
        answer = await exchange.answer()
        if answer.status == 100:
            answer = await exchange.answer()
        events = [event for event in answer.body.decode().split("\n\n") if event.strip(":")]
        assert (len(events), events[-1]) == (5, "data: [DONE]")
        assert await exchange.ended()


async def test_a_slow_answer_comes_behind_an_interim_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP-03."""
    monkeypatch.setattr(http_server, "PROBE_AFTER", 0.02)
    backend = FakeBackend()
    backend.pause_at = 1
    async with listening(backend) as port, connect(port, post(body=WHOLE)) as exchange:
        exchange.half_close()
        assert (await exchange.answer()).status == 100
        backend.go_on.set()
        answer = await exchange.answer()
        assert (answer.status, b"one two three" in answer.body) == (200, True)
        assert await exchange.ended()


@pytest.mark.parametrize("request_", [post(body=STREAM), post(body=WHOLE), *RESPONSES])
@pytest.mark.parametrize("pause_at", [0, 1])
async def test_who_is_gone_is_noticed_in_every_phase(pause_at: int, request_: bytes) -> None:
    """HTTP-03: even if there is no token to write."""
    backend = FakeBackend()
    backend.pause_at = pause_at
    async with listening(backend) as port, connect(port, request_) as exchange:
        await backend.submitted.wait()
        exchange.leave()
        await asyncio.wait_for(backend.requests[0].left.wait(), PATIENCE)


async def test_who_leaves_in_the_output_is_noticed_by_the_next_token() -> None:
    """HTTP-03."""
    backend = FakeBackend(endless, max_model_len=100_000)
    data = post(body=b'{"prompt":"hi","stream":true,"max_tokens":90000}')
    async with listening(backend) as port, connect(port, data) as exchange:
        await exchange.answer(to_head=True)
        exchange.leave()
        await asyncio.wait_for(backend.requests[0].left.wait(), PATIENCE)


@pytest.mark.parametrize("data", [b"", b"GET /v1/mo", post()[:-5], get() + b"GET /"])
async def test_half_a_request_is_not_waited_for(data: bytes) -> None:
    async with listening() as port, connect(port, data) as exchange:
        exchange.half_close()
        if data.startswith(get()):
            assert (await exchange.answer()).status == 200
        assert await exchange.ended()


async def test_an_idle_connection_ends_with_the_client_side() -> None:
    async with listening() as port, connect(port, get()) as exchange:
        assert (await exchange.answer()).status == 200
        exchange.half_close()
        assert await exchange.ended()

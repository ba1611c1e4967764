"""Tests of shutting down: running requests finish or get an error, and new ones are refused."""

import asyncio
import json
from typing import Any

import pytest

from services.gateway.lifecycle import Lifecycle
from shared.admin import DrainState
from shared.errors import Unavailable
from shared.protocol import Welcome
from tests.gateway.fakes import FakeBackend, error_of, serve
from tests.waiting import until

FIELDS: dict[str, Any] = {"prompt": "hi", "stream": True}


async def test_draining_refuses_new_requests_and_lets_running_ones_finish() -> None:
    backend = FakeBackend()
    backend.pause_at = 1
    async with serve(backend) as client, client.post("/v1/completions", json=FIELDS) as running:
        client.gateway.lifecycle.drain()
        async with client.post("/v1/completions", json={"prompt": "hi"}) as response:
            assert response.status == 503
            assert response.headers["Connection"] == "close"
            assert (await error_of(response))["type"] == "ServiceUnavailableError"
        async with client.get("/health") as response:
            assert response.status == 503
        assert not await client.gateway.lifecycle.wait_drained(0.01)
        backend.go_on.set()
        assert "three" in await running.text()
        assert await client.gateway.lifecycle.wait_drained(10)


async def test_a_drain_that_is_delayed_still_takes_requests_at_first() -> None:
    """Balancers see at once that it drains."""
    async with serve(shutdown_delay=3600.0) as client:
        lifecycle = client.gateway.lifecycle
        lifecycle.drain()
        async with client.get("/health") as response:
            assert response.status == 503
        async with client.post("/v1/completions", json={"prompt": "hi"}) as response:
            assert response.status == 200
            assert response.headers["Connection"] == "close"
        assert not await lifecycle.wait_drained(0.01)
        assert lifecycle.drain_state == DrainState(draining=True, drained=False, unfinished=0)


def test_a_drain_that_has_not_begun_has_no_time_left() -> None:
    """However long it may take, and however short ago the host, and so its clock, has started."""
    assert Lifecycle(drain_timeout=1e12).seconds_left == 0


async def test_a_drain_ends_its_delay_and_counts_its_time_from_the_beginning() -> None:
    lifecycle = Lifecycle(shutdown_delay=0.05, drain_timeout=1000.0)
    lifecycle.drain()
    with lifecycle.running():
        pass
    assert await lifecycle.wait_drained(10)
    assert lifecycle.drain_state == DrainState(draining=True, drained=True, unfinished=0)
    with pytest.raises(Unavailable), lifecycle.running():
        pass
    before = lifecycle.seconds_left
    lifecycle.drain()
    assert 900 < lifecycle.seconds_left < before


async def test_a_stream_that_runs_at_a_drain_closes_its_connection_after_its_end() -> None:
    backend = FakeBackend()
    backend.pause_at = 1
    async with serve(backend) as client:
        address = client.server.host, client.server.port
        reader, writer = await asyncio.open_connection(*address)
        body = json.dumps(FIELDS).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        assert b"close" not in await reader.readuntil(b"\r\n\r\n")
        client.gateway.lifecycle.drain()
        backend.go_on.set()
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


async def test_a_stream_that_is_cut_ends_in_an_error() -> None:
    backend = FakeBackend()
    backend.pause_at = 1
    async with serve(backend) as client, client.post("/v1/completions", json=FIELDS) as running:
        assert b'"one"' in await running.content.readuntil(b"\n\n")
        client.gateway.lifecycle.abort()
        error, done = (await running.text()).strip().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
        assert done == "data: [DONE]"
        assert backend.requests[0].left.is_set()
        assert await client.gateway.lifecycle.wait_drained(10)


async def test_a_request_that_is_aborted_before_its_answer_has_a_status() -> None:
    backend = FakeBackend()
    backend.pause_at = 1
    async with serve(backend) as client:
        asking = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "hi"}))
        await backend.submitted.wait()
        client.gateway.lifecycle.abort()
        async with await asking as response:
            assert response.status == 503
            await error_of(response)


async def test_a_drain_counts_a_request_that_waits_for_the_first_engine() -> None:
    backend, come = FakeBackend(), asyncio.Event()
    first_welcome = backend.first_welcome

    async def wait() -> Welcome:
        await come.wait()
        return await first_welcome()

    backend.first_welcome = wait  # type: ignore[method-assign]
    async with serve(backend) as client:
        lifecycle = client.gateway.lifecycle
        asking = [asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "hi"})) for _ in range(2)]
        await until(lambda: lifecycle.num_running == 2)
        lifecycle.drain()
        assert lifecycle.drain_state == DrainState(draining=True, drained=False, unfinished=2)
        come.set()
        for one in asking:
            async with await one as response:
                assert response.status == 200
        assert await lifecycle.wait_drained(10)


@pytest.mark.parametrize("fields", [{"prompt": "hi"}, FIELDS])
async def test_a_request_that_waits_for_the_first_engine_is_aborted_with_a_status(fields: dict[str, Any]) -> None:
    backend = FakeBackend()
    backend.first_welcome = asyncio.Event().wait  # type: ignore[assignment]
    async with serve(backend) as client:
        lifecycle = client.gateway.lifecycle
        asking = asyncio.ensure_future(client.post("/v1/completions", json=fields))
        await until(lambda: lifecycle.num_running == 1)
        lifecycle.drain()
        lifecycle.abort()
        async with await asking as response:
            assert response.status == 503
            assert (await error_of(response))["message"] == "the server is shutting down"


async def test_a_request_whose_body_is_coming_at_a_drain_is_served() -> None:
    backend = FakeBackend()
    async with serve(backend) as client:
        lifecycle = client.gateway.lifecycle
        reader, writer = await asyncio.open_connection(client.server.host, client.server.port)
        body = json.dumps({"prompt": "hi"}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:3])
        await until(lambda: lifecycle.num_running == 1)
        lifecycle.drain()
        assert not lifecycle.drain_state.drained
        writer.write(body[3:])
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200 ")
        assert lifecycle.drain_state.drained
        writer.close()


async def test_a_cancellation_is_not_an_abort() -> None:
    lifecycle = Lifecycle()

    async def work() -> None:
        with lifecycle.running():
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    assert lifecycle.num_running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lifecycle.num_running == 0


async def test_cutting_twice_is_cutting_once() -> None:
    lifecycle = Lifecycle()
    seen = []

    async def work() -> None:
        try:
            with lifecycle.running():
                await asyncio.Event().wait()
        except Unavailable as error:
            seen.append(str(error))
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0  # so the task may use timeouts and task groups again
            await asyncio.sleep(0)  # not cancelled again

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    lifecycle.abort()
    lifecycle.abort()
    await task
    assert len(seen) == 1
    assert lifecycle.draining

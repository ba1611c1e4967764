"""Tests of unreadable requests: they are answered in the API's shape, in their turn, with one line in the log."""

import asyncio
import gzip
import logging

import pytest

from tests.gateway.fakes import FakeBackend
from tests.gateway.raw_http import ask, connect, get, listening, post

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

BROKEN = {
    "method": b"F\xffO / HTTP/1.1\r\nHost: x\r\n\r\n",
    "request line": b"nonsense\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "version": b"GET /health HTTP/x\r\nHost: x\r\n\r\n",
    "length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "header": b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000 + b"\r\n\r\n",
    "long path": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
}
STATUS = {"long header": 431, "long path": 414}


@pytest.mark.parametrize("kind", BROKEN)
async def test_what_is_no_request_gets_the_apis_error(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with listening() as port:
        answer = await ask(port, BROKEN[kind])
        assert (answer.status, answer.error["type"]) == (STATUS.get(kind, 400), "BadRequestError")
        assert answer.error["param"] is None
        assert answer.error["message"].startswith("the request cannot be read: ")
        assert answer.headers["content-type"].startswith("application/json")
        assert (await ask(port, post())).status == 200
    (record,) = [record for record in caplog.records if record.name != "asyncio"]
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert answer.headers["x-request-id"] == record.request_id  # type: ignore[attr-defined]
    assert len(record.getMessage()) < 400
    assert record.getMessage().isprintable()


STREAM = post(body=b'{"prompt":"hi","stream":true}')
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'f\r\n{"prompt": "hi"\r\n1\r\n}\r\n0\r\n\r\n'
)


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize(
    "valid", [[get()], [post()], [STREAM], [CHUNKED, get(), post()], [get("/no"), CHUNKED, STREAM]]
)
@pytest.mark.parametrize("packets", [1, 50])
async def test_requests_before_what_is_none_are_answered(kind: str, valid: list[bytes], packets: int) -> None:
    """HTTP-09."""
    data = b"".join([*valid, BROKEN[kind]])
    size = len(data) // packets + 1
    async with listening() as port, connect(port) as exchange:
        for at in range(0, len(data), size):
            exchange.send(data[at : at + size])
            await asyncio.sleep(0.001 if packets > 1 else 0)
        statuses = [(await exchange.answer()).status for _ in valid]
        assert statuses == [404 if one == get("/no") else 200 for one in valid]
        assert (await exchange.answer()).status == STATUS.get(kind, 400)
        assert await exchange.ended()


async def test_an_unreadable_request_waits_for_the_one_before_it() -> None:
    """HTTP-09: unreadable bytes behind a request do not cut its stream."""
    backend = FakeBackend()
    backend.pause_at = 1
    async with listening(backend) as port, connect(port, STREAM + b"nonsense\r\n\r\n") as exchange:
        await backend.submitted.wait()
        exchange.send(b"more of it\r\n\r\n")
        backend.go_on.set()
        assert (await exchange.answer()).body.endswith(b"data: [DONE]\n\n")
        assert (await exchange.answer()).status == 400
        assert await exchange.ended()


@pytest.mark.parametrize("count", [40, 200])
async def test_many_requests_in_one_packet_are_all_answered(count: int) -> None:
    """HTTP-09: the parser's pauses lose no request, with a body or without."""
    data = b"".join(get("/version") if at % 3 else post() for at in range(count))
    async with listening() as port, connect(port, data) as exchange:
        assert [(await exchange.answer()).status for _ in range(count)] == [200] * count


async def test_a_long_body_is_read_piece_by_piece_and_the_next_request_after_it() -> None:
    """HTTP-09: bodies that exceed the buffer, plain and compressed."""
    body = b'{"prompt":"hi","user":"' + b"u" * 3_000_000 + b'"}'
    data = post(body=body) + get() + post("Content-Encoding: gzip", body=gzip.compress(body)) + get("/nowhere")
    async with listening() as port, connect(port, data) as exchange:
        assert [(await exchange.answer()).status for _ in range(4)] == [200, 200, 200, 404]


async def test_what_comes_behind_a_declined_upgrade_is_answered() -> None:
    """HTTP-09."""
    upgrade = get("/health", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    async with listening() as port, connect(port, upgrade + get() + post() + b"nonsense\r\n\r\n") as exchange:
        assert [(await exchange.answer()).status for _ in range(4)] == [200, 200, 200, 400]


async def test_a_content_encoding_that_is_not_known_gets_the_apis_error() -> None:
    """DOS-01: nothing is unpacked, nor is what is packed twice."""
    async with listening() as port:
        for name in ("br", "zstd"):
            answer = await ask(port, post(f"Content-Encoding: {name}"))
            assert answer.status == 415
            assert "Content-Encoding" in answer.error["message"]
        packed = gzip.compress(b'{"prompt":"hi","max_tokens":1}')
        assert (await ask(port, post("Content-Encoding: gzip", body=packed))).status == 200
        assert (await ask(port, post("Content-Encoding: gzip, gzip", body=gzip.compress(packed)))).status == 400


@pytest.mark.parametrize("headers", [("Content-Encoding: gzip",), ("Content-Encoding: deflate",)])
async def test_a_broken_body_leaves_no_traceback_in_the_log(
    headers: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with listening() as port:
        assert (await ask(port, post(*headers))).error["code"] == 400
        assert (await ask(port, post())).status == 200
    records = [record for record in caplog.records if record.name != "asyncio"]
    assert len(records) == 1
    assert all(record.levelno == logging.INFO and record.exc_info is None for record in records)


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
async def test_a_connection_that_ends_after_a_broken_body_says_so(path: str) -> None:
    """A client would send its next request over it, and lose that. The rest of a packed body is not unpacked."""
    bomb = gzip.compress(b" " * 100_000_000)
    async with listening() as port:
        for body in (b"no gzip", bomb):
            answer = await ask(port, post("Content-Encoding: gzip", path=path, body=body))
            assert answer.status in (400, 404, 413)
            assert answer.headers["connection"] == "close"

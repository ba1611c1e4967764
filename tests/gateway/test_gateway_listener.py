"""What never becomes a request is answered in the API's shape too, with one line in the log."""

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from services.gateway.app import make_app
from services.gateway.listener import Runner
from tests.gateway.fakes import FakeBackend, make_gateway

BODY = b'{"prompt":"hi","max_tokens":1}'


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """The port of a gateway on the runner that the service uses."""
    runner = Runner(make_app(make_gateway(FakeBackend())), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def send(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


def post(*headers: str, body: bytes = BODY) -> bytes:
    fields = (
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    )
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *fields, "", ""]).encode() + body


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


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
async def test_what_is_no_request_gets_the_apis_error(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with listening() as port:
        status, headers, body = await send(port, data)
        error = json.loads(body)["error"]
        assert (status, error["code"], error["type"], error["param"]) == (400, 400, "BadRequestError", None)
        assert error["message"].startswith("the request cannot be read: ")
        assert headers["Content-Type"].startswith("application/json")
        assert (await send(port, post()))[0] == 200
    (record,) = [record for record in caplog.records if record.name != "asyncio"]
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert headers["X-Request-Id"] in record.getMessage()
    assert len(record.getMessage()) < 400
    assert record.getMessage().isprintable()


async def test_a_content_encoding_that_is_not_known_gets_the_apis_error() -> None:
    async with listening() as port:
        for name in ("br", "zstd"):
            status, _, body = await send(port, post(f"Content-Encoding: {name}"))
            assert (status, json.loads(body)["error"]["code"]) == (400, 400)
            assert b"Content-Encoding" in body
        assert (await send(port, post("Content-Encoding: gzip", body=gzip.compress(BODY))))[0] == 200


async def test_an_expectation_that_cannot_be_met_gets_the_apis_error() -> None:
    async with listening() as port:
        status, headers, body = await send(port, post("Expect: miracles"))
        assert (status, json.loads(body)["error"]["code"]) == (417, 417)
        assert "X-Request-Id" in headers


@pytest.mark.parametrize("headers", [("Content-Encoding: gzip",), ("Content-Encoding: deflate",)])
async def test_a_broken_body_leaves_no_traceback_in_the_log(
    headers: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with listening() as port:
        status, _, body = await send(port, post(*headers))
        assert (status, json.loads(body)["error"]["code"]) == (400, 400)
        assert (await send(port, post()))[0] == 200
    records = [record for record in caplog.records if record.name != "asyncio"]
    assert len(records) == 1
    assert all(record.levelno == logging.INFO and record.exc_info is None for record in records)

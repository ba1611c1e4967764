"""Runs a gateway on the service's runner, and talks to it byte by byte, without a client library."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from msgspec import Struct

from services.gateway.app import make_app
from services.gateway.http_server import HttpRunner
from tests.gateway.fakes import FakeBackend, make_gateway
from tests.waiting import PATIENCE

BODY = b'{"prompt":"hi","max_tokens":1}'


@asynccontextmanager
async def listening(backend: FakeBackend | None = None, **settings: Any) -> AsyncIterator[int]:
    """Yield the port of a gateway with these settings (those of `make_gateway`)."""
    app = make_app(make_gateway(backend or FakeBackend(), **settings))
    runner = HttpRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


class Answer(Struct):
    """A response, be it final or interim."""

    version: str
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes = b""

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.body)["error"]
        assert error["code"] == self.status
        return dict(error)


class Exchange:
    """A connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def half_close(self) -> None:
        """Shut down the sending side, and keep the receiving side."""
        self._writer.write_eof()

    def leave(self) -> None:
        """Close in both directions, cleanly."""
        with socket.fromfd(self._writer.get_extra_info("socket").fileno(), socket.AF_INET, socket.SOCK_STREAM) as raw:
            raw.shutdown(socket.SHUT_RDWR)

    async def answer(self, *, to_head: bool = False) -> Answer:
        """Return the next response. One with neither a length nor chunks lasts to the end of the connection."""
        async with asyncio.timeout(PATIENCE):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            version, status, _ = first.split(" ", 2)
            fields = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            answer = Answer(version, int(status), fields)
            if not to_head and answer.status not in (100, 204):
                answer.body = await self._body(fields)
            return answer

    async def ended(self) -> bool:
        """Return whether the server ends the connection now, without another byte."""
        return await asyncio.wait_for(self.reader.read(), PATIENCE) == b""

    async def _body(self, fields: dict[str, str]) -> bytes:
        if "content-length" in fields:
            return await self.reader.readexactly(int(fields["content-length"]))
        if "transfer-encoding" not in fields:
            return await self.reader.read()
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += (await self.reader.readexactly(size + 2))[:size]
        await self.reader.readline()
        return body


@asynccontextmanager
async def connect(port: int, data: bytes = b"") -> AsyncIterator[Exchange]:
    """Yield a connection on which `data` was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    exchange = Exchange(reader, writer)
    exchange.send(data)
    try:
        yield exchange
    finally:
        writer.transport.abort()


async def ask(port: int, data: bytes) -> Answer:
    """Return the first response to some bytes."""
    async with connect(port, data) as exchange:
        return await exchange.answer()


def get(path: str = "/v1/models", *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *headers, "", ""]).encode()


def post(*headers: str, body: bytes = BODY, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    fields = ("Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join([f"POST {path} HTTP/{version}", *fields, "", ""]).encode() + body

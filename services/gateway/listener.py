"""`Runner`: aiohttp's, with connections that answer each request in the API's shape, as long as there is a client.

What aiohttp cannot read (no HTTP, a header too long, a Content-Encoding that it does not know) it answers below all
middlewares, as plain text with a traceback in the log. Here such answers have the API's shape, and the log one line:
it is the client's fault, and a stranger must not be able to fill the log.

A client may end its sending side and wait for the answer. That looks just like one that went away, until something is
written to it: so if an answer takes longer than a moment, something is written that clients pass over.

Where the library has no hook this reaches into it: `AppRunner._make_server`, `Server._loop` and `Server._kwargs`,
`RequestHandler._parser`, `_request_count` and `_current_request`.
"""

import asyncio
import logging
import uuid
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from services.gateway import faults
from services.gateway.expect import CONTINUE
from services.gateway.hangups import HangUps
from services.gateway.request_parser import RequestParser

logger = logging.getLogger(__name__)

SHOWN = 200  # characters of what the client did wrong

PROBE_AFTER = 0.25
"""Seconds that an answer to a half-closed connection may take before it is tried whether the client is still there."""

LINGER = 2.0
"""Seconds for which what a client still sends behind an error is read and dropped. Were the connection closed at once,
the client's system would take that for a reset, and might drop the answer before it is read."""

COMMENT = b":\n\n"  # of server-sent events


class Runner(web.AppRunner):
    """Runs an application on connections that answer as the API does."""

    _hang_ups: HangUps

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        self._hang_ups = HangUps(made._loop)
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            hang_ups=self._hang_ups,
            **made._kwargs,
        )

    async def cleanup(self) -> None:
        await super().cleanup()
        self._hang_ups.close()


class _Server(web.Server):
    def __init__(self, *args: Any, hang_ups: HangUps, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hang_ups = hang_ups

    def __call__(self) -> RequestHandler:
        return _Connection(self, self._hang_ups, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """One connection. An error closes it: where the next request would begin is not known."""

    __slots__ = ("_answered", "_half_closed", "_hang_ups", "_probing", "_requests")

    def __init__(
        self, server: web.Server, hang_ups: HangUps, *, loop: asyncio.AbstractEventLoop, **kwargs: Any
    ) -> None:
        super().__init__(server, loop=loop, **kwargs)
        self._parser = self._requests = RequestParser(self, loop, self._read_bufsize)
        self._hang_ups = hang_ups
        self._answered = 0
        self._half_closed: int | None = None  # the socket's number, once the client has ended its sending side
        self._probing: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. The connection is kept (True) if an answer is due to a request that came whole."""
        if self._half_closed is not None:  # uvloop says it again whenever reading is resumed
            return True
        transport = self.transport
        if transport is None or self._request_count == self._answered or not self._requests.between_requests:
            return False
        self._half_closed = transport.get_extra_info("socket").fileno()
        self._hang_ups.watch(self._half_closed, transport.abort)
        self._probing = self._loop.call_later(PROBE_AFTER, self._probe)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop watching the socket; the library then cancels the handler."""
        if self._half_closed is not None:
            self._hang_ups.forget(self._half_closed)
        if self._probing is not None:
            self._probing.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request, or to what a middleware let through."""
        if request.writer.output_size > 0:  # as the library does: a second head would be taken for the body
            raise ConnectionError("an answer is on its way already, so the error cannot be told")
        id = uuid.uuid4().hex
        if isinstance(exc, HttpProcessingError):
            what = _first_line(message or exc.message)
            logger.info("%s %s sent what is no request: %s", id, request.remote, what)
            if isinstance(exc, ContentEncodingError):
                what = "its Content-Encoding is none that this server knows"
            fault = faults.Fault(status, f"the request cannot be read: {what}")
        elif exc is None:
            fault = faults.Fault(status, message or "the request failed")
        else:
            fault = faults.fault_of(exc)
        response = faults.respond(fault)
        response.headers["X-Request-Id"] = id
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends an answer. An exception of aiohttp's comes here only past the middlewares, as for an odd Expect."""
        if isinstance(resp, web.HTTPException):
            resp = faults.respond(faults.fault_of(resp))
        resp, reset = await super().finish_response(request, resp, start_time)
        self._answered += 1
        if self._answered == self._request_count:
            if self._half_closed is not None:
                resp.force_close()  # nobody will ask for more
            elif self._requests.failed:
                await self._linger()
        return resp, reset

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A broken body comes up a second time, after its answer, when the library reads on to the next request."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            logger.info("a client sent a body that cannot be read; its connection is closed")
        else:
            super().log_exception(*args, **kw)

    async def _linger(self) -> None:
        """Let the client read the answer to what is no request; cancelled as soon as it closes its side."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()
            await asyncio.sleep(LINGER)

    def _probe(self) -> None:
        """Write something to a client that may be gone. If it is, its system says so, and the hang-up is noticed.

        Before an answer that is an interim response, which a client has to pass over; HTTP/1.0 has none. What has
        begun and is not handed to `finish_response` yet is a stream of events, written in whole ones.
        """
        request = self._current_request
        if request is None or self.transport is None or self.transport.is_closing():
            return
        writer: Any = request.writer
        if writer.output_size:
            self.transport.write(b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT) if writer.chunked else COMMENT)
        elif request.version >= HttpVersion11:
            self.transport.write(CONTINUE)


def _first_line(message: str) -> str:
    """Without the bytes that the client sent, which follow in the library's messages."""
    line = message.partition("\n")[0].strip().rstrip(":")
    return line[:SHOWN].encode("ascii", "backslashreplace").decode()

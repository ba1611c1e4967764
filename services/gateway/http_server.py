"""`HttpRunner`: aiohttp's server, with API errors for unreadable requests, and with half-closed connections.

A request that cannot be read (not HTTP, a header that is too long, an unknown Content-Encoding) never reaches the
middlewares. aiohttp answers it with plain text, and logs a traceback. Here the response is an error of the API, and the
log gets one line, since the client is at fault and must not be able to fill the log.

A client may shut down its sending side and wait for the response. That looks like a client that has gone away, until
something is written to it. So while such a response is pending, the connection writes bytes that clients skip.

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

from services.gateway import errors
from services.gateway.body import CONTINUE
from services.gateway.hangups import HangUpWatcher
from services.gateway.request_parser import RequestParser
from shared.log_format import of_request
from shared.log_limit import LIMITED

logger = logging.getLogger(__name__)

MAX_REASON = 200  # characters

PROBE_AFTER = 0.25
"""Seconds that a half-closed connection waits for its response before it probes whether the client is still there."""

LINGER = 2.0
"""Seconds for which the connection still reads, and drops, what a client sends after an unreadable request. If it
closed at once, the client's system might get a reset, and drop the response before the client has read it."""

COMMENT = b":\n\n"  # a comment among server-sent events


class HttpRunner(web.AppRunner):
    """Runs an application on connections of the class below."""

    _hang_ups: HangUpWatcher

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        self._hang_ups = HangUpWatcher(server._loop)
        return _Server(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            loop=server._loop,
            hang_ups=self._hang_ups,
            **server._kwargs,
        )

    async def cleanup(self) -> None:
        await super().cleanup()
        self._hang_ups.close()


class _Server(web.Server):
    def __init__(self, *args: Any, hang_ups: HangUpWatcher, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hang_ups = hang_ups

    def __call__(self) -> RequestHandler:
        return _Connection(self, self._hang_ups, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """One connection. An unreadable request closes it, since the start of the next request is unknown."""

    __slots__ = ("_half_closed", "_hang_ups", "_num_answered", "_probe_timer", "_request_parser", "_resumes")

    def __init__(
        self, server: web.Server, hang_ups: HangUpWatcher, *, loop: asyncio.AbstractEventLoop, **kwargs: Any
    ) -> None:
        super().__init__(server, loop=loop, **kwargs)
        self._parser = self._request_parser = RequestParser(self, loop, self._read_bufsize)
        self._hang_ups = hang_ups
        self._num_answered = 0
        self._half_closed: int | None = None  # the socket's descriptor, once the client has shut down its sending side
        self._probe_timer: asyncio.TimerHandle | None = None
        self._resumes = False  # reading goes on in the loop's next turn

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Go on reading. If it was paused, do so in the loop's next turn: others run between pieces of a packed body.

        The library goes on at once, so that the reader of a small body that is long when unpacked would never wait.
        """
        if not self._reading_paused:
            super().resume_reading(resume_parser)
        elif not self._resumes:
            self._resumes = True
            self._loop.call_soon(self._resume_reading, resume_parser)

    def _resume_reading(self, resume_parser: bool) -> None:
        self._resumes = False
        if self.transport is not None:
            super().resume_reading(resume_parser)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection: the client sends no more, but a complete request is unanswered."""
        if self._half_closed is not None:  # uvloop calls this again whenever reading is resumed
            return True
        transport = self.transport
        if transport is None or self._request_count == self._num_answered or not self._request_parser.between_requests:
            return False
        self._half_closed = transport.get_extra_info("socket").fileno()
        self._hang_ups.watch(self._half_closed, transport.abort)
        self._probe_timer = self._loop.call_later(PROBE_AFTER, self._probe_client)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop watching the socket; the library then cancels the handler."""
        if self._half_closed is not None:
            self._hang_ups.forget(self._half_closed)
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to an unreadable request, or to an exception that a middleware let through."""
        if request.writer.output_size > 0:  # as in the library: a second head would be read as body
            raise ConnectionError("a response has begun already, so the error cannot be sent")
        id = uuid.uuid4().hex
        if isinstance(exc, HttpProcessingError):
            reason = _first_line(message or exc.message)
            extra = {**of_request(id), **LIMITED}
            logger.info("%s sent an unreadable request: %s", request.remote, reason, extra=extra)
            if isinstance(exc, ContentEncodingError):
                status, reason = 415, "its Content-Encoding is not supported"
            error = errors.ApiError(status, f"the request cannot be read: {reason}")
        elif exc is None:
            error = errors.ApiError(status, message or "the request failed")
        else:
            error = errors.to_api_error(exc, id)
        response = errors.error_response(error)
        response.headers["X-Request-Id"] = id
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response. If it is an exception of aiohttp, no middleware has seen it, as after a wrong Expect."""
        if isinstance(resp, web.HTTPException):
            resp = errors.error_response(errors.to_api_error(resp))
        if "Content-Encoding" in request.headers and not request.content.is_eof():
            resp.force_close()
            if request.content.exception() is None:
                self._request_parser.failed = True  # the rest is not unpacked
        resp, reset = await super().finish_response(request, resp, start_time)
        self._num_answered += 1
        if self._num_answered == self._request_count:
            if self._half_closed is not None:
                resp.force_close()  # the client cannot send another request
            elif self._request_parser.failed:
                await self._linger()
        return resp, reset

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log one line for an unreadable body, which raises again when the library skips it for the next request."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            logger.info("a client sent a body that cannot be read; its connection is closed")
        else:
            super().log_exception(*args, **kw)

    async def _linger(self) -> None:
        """Give the client time to read the error. This is cancelled when the client closes the connection."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()
            await asyncio.sleep(LINGER)

    def _probe_client(self) -> None:
        """Write to a client that may be gone. If it is, its system answers with a reset, and the watcher notices.

        Before the response, write an interim one, which clients skip (HTTP/1.0 has none). A response that has begun
        and is not finished is a stream of events, each of which was written whole; write a comment to it.
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
    """Return the first line of the library's message. The lines after it quote the client's bytes."""
    line = message.partition("\n")[0].strip().rstrip(":")
    return line[:MAX_REASON].encode("ascii", "backslashreplace").decode()

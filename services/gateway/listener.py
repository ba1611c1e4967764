"""`Runner`: aiohttp's, with answers of our own to what never becomes a request.

What aiohttp cannot read (no HTTP, a header too long, a Content-Encoding that it does not know) it answers below all
middlewares, as plain text with a traceback in the log. Here such answers have the API's shape, and the log one line:
it is the client's fault, and a stranger must not be able to fill the log.

Where the library has no hook this reaches into it: `AppRunner._make_server`, `Server._loop` and `Server._kwargs`.
"""

import logging
import uuid
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from services.gateway import faults

logger = logging.getLogger(__name__)

SHOWN = 200  # characters of what the client did wrong


class Runner(web.AppRunner):
    """Runs an application on connections that answer as the API does."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """One connection. An error closes it: where the next request would begin is not known."""

    __slots__ = ()

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
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A broken body comes up a second time, after its answer, when the library reads on to the next request."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            logger.info("a client sent a body that cannot be read; its connection is closed")
        else:
            super().log_exception(*args, **kw)


def _first_line(message: str) -> str:
    """Without the bytes that the client sent, which follow in the library's messages."""
    line = message.partition("\n")[0].strip().rstrip(":")
    return line[:SHOWN].encode("ascii", "backslashreplace").decode()

"""Reads and decodes a request's body: checks its type, size and time, and answers `Expect: 100-continue`.

A client that expects "100 Continue" waits for permission to send its body. The gateway gives it when it is about to
read the body, not when the headers have come, so the body of a request with a wrong key, path or length is never sent.
"""

import asyncio

from aiohttp import HttpVersion11, web

from services.gateway import ignored_fields
from services.gateway.api_requests import RequestT, decode
from services.gateway.bounds import SMALL_BODY
from services.gateway.errors import BodyTimeout, BodyTooLong, UnreadableBody
from services.gateway.gateway import GATEWAY
from services.gateway.threads import run_in_thread_if
from shared.errors import InvalidRequest

BODY_TIMEOUT = 120.0
"""Seconds within which a body must arrive: 16 MiB take that long at 1.5 MBit/s."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def read(request: web.Request, *request_types: type[RequestT]) -> RequestT:
    """Return the body, decoded as one of these types. Without a Content-Type it is JSON; others get 400, as in vLLM."""
    declared = request.content_type if "Content-Type" in request.headers else "application/json"
    if declared != "application/json" and not declared.endswith("+json"):
        raise InvalidRequest(f"the body must be application/json, not {declared}")
    gateway = request.app[GATEWAY]
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            body = await _receive(request, gateway.max_body_size)
    except TimeoutError as error:
        raise BodyTimeout(BODY_TIMEOUT) from error
    except web.RequestPayloadError as error:
        raise UnreadableBody from error
    strict = gateway.config.strict_fields
    decoded, ignored = await run_in_thread_if(len(body) > SMALL_BODY, decode, body, *request_types, strict=strict)
    ignored_fields.report(request, ignored)
    return decoded


async def _receive(request: web.Request, max_size: int) -> bytes:
    """Return the body, decompressed. Raise `BodyTooLong` if its declared or actual size exceeds `max_size` bytes."""
    if (declared := request.content_length or 0) > max_size:
        raise BodyTooLong(declared, max_size)
    await _send_continue(request)
    body = bytearray()
    while chunk := await request.content.readany():
        body += chunk
        if len(body) > max_size:
            raise BodyTooLong(len(body), max_size)
    return bytes(body)


async def check_expect(request: web.Request) -> None:
    """Raise `HTTPExpectationFailed` (417) if the request expects anything else. HTTP/1.0 has no expectations."""
    if request.version >= HttpVersion11 and request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed


def awaits_continue(request: web.Request) -> bool:
    """Return whether the client waits for permission to send its body, and has not sent it anyway."""
    return "Expect" in request.headers and request.version >= HttpVersion11 and not request.content.is_eof()


async def _send_continue(request: web.Request) -> None:
    if awaits_continue(request):
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0  # it counts the response, which has not begun

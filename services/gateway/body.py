"""Reading a request's body, and the head that all of one answer's objects have in common."""

import asyncio
import time
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from services.gateway import ignored
from services.gateway.bounds import SMALL
from services.gateway.expect import send_continue
from services.gateway.faults import LateBody, UnreadableBody
from services.gateway.offload import off_loop_if
from services.gateway.openai import GenerationRequest, decode
from services.gateway.serving import GATEWAY
from shared.errors import InvalidRequest

R = TypeVar("R", bound=GenerationRequest)

TIMEOUT = 120.0
"""Seconds in which a body must have come: 16 MiB do over a line of 1.5 MBit/s."""


async def read(request: web.Request, kind: type[R]) -> R:
    """Return the body as a `kind`. A body without a declared type is taken as JSON; other types get 400, as in vLLM."""
    declared = request.content_type if "Content-Type" in request.headers else "application/json"
    if declared != "application/json" and not declared.endswith("+json"):
        raise InvalidRequest(f"the body must be application/json, not {declared}")
    gateway = request.app[GATEWAY]
    try:
        async with asyncio.timeout(TIMEOUT):
            body = await _receive(request, gateway.max_body_size)
    except TimeoutError as error:
        raise LateBody from error
    except web.RequestPayloadError as error:
        raise UnreadableBody from error
    strict = gateway.config.strict_fields
    decoded, fields = await off_loop_if(len(body) > SMALL, decode, body, kind, strict=strict)
    ignored.note(request, fields)
    return decoded


async def _receive(request: web.Request, most: int) -> bytes:
    """Return the body's bytes, decompressed piece by piece. Raises 413 if more than `most` are announced or come."""
    if (request.content_length or 0) > most:
        raise web.HTTPRequestEntityTooLarge(most)
    await send_continue(request)
    body = bytearray()
    while chunk := await request.content.readany():
        body += chunk
        if len(body) > most:
            raise web.HTTPRequestEntityTooLarge(most)
    return bytes(body)


class Head(Struct, frozen=True):
    """`id`, `object`, `created` and `model`, the same in each chunk of a stream."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def now(cls, id: str, object: str, model: str) -> "Head":
        return cls(id, object, int(time.time()), model)

    @property
    def opening(self) -> bytes:
        """A chunk's JSON up to its choices, to be made once a stream."""
        return msgspec.json.encode(self)[:-1] + b',"choices":['

    def answer(self, choices: list[Any], **rest: Any) -> web.Response:
        """A whole answer."""
        fields = msgspec.structs.asdict(self) | {"choices": choices} | rest
        return web.Response(body=msgspec.json.encode(fields), content_type="application/json")

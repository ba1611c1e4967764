"""Reading a request's body, and the head that all of one answer's objects have in common."""

import asyncio
import time
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from services.gateway.expect import go_on
from services.gateway.faults import LateBody, UnreadableBody
from services.gateway.openai import GenerationRequest, decode
from shared.errors import InvalidRequest

R = TypeVar("R", bound=GenerationRequest)

TIMEOUT = 120.0
"""Seconds in which a body must have come: 32 MiB do over a line of 3 MBit/s."""


async def read(request: web.Request, kind: type[R]) -> R:
    """The body as a `kind`. A body without a declared type is taken as JSON; other types get 400, as in vLLM."""
    declared = request.content_type if "Content-Type" in request.headers else "application/json"
    if declared != "application/json" and not declared.endswith("+json"):
        raise InvalidRequest(f"the body must be application/json, not {declared}")
    try:
        async with asyncio.timeout(TIMEOUT):
            if (request.content_length or 0) > request.client_max_size:
                raise web.HTTPRequestEntityTooLarge(request.client_max_size)
            await go_on(request)
            body = await request.read()
    except TimeoutError as error:
        raise LateBody from error
    except web.RequestPayloadError as error:
        raise UnreadableBody from error
    return decode(body, kind)


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

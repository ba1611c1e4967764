"""The only place that makes error bodies. Every refusal and failure of the API leaves in one shape:

    {"error": {"message": ..., "type": ..., "param": ..., "code": <HTTP status>}}

`fault_of` translates exceptions. Whatever is not in the table is a bug of ours: status 500, and a traceback in the log.
"""

import logging
import math
from collections.abc import Mapping

import msgspec
from aiohttp import web
from msgspec import Struct

from shared.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable

logger = logging.getLogger(__name__)

TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

MESSAGE = 500  # characters; a client's own words, such as a template's error about them, may be megabytes
PARAM = 100  # characters

SOON = 1  # seconds after which it is worth trying an unavailable server again


class Fault(Struct, frozen=True):
    """An error as a client sees it."""

    status: int
    message: str
    param: str | None = None
    headers: Mapping[str, str] = {}


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""


class Unauthorized(Exception):
    """No valid API key came with the request."""


class UnreadableBody(Exception):
    """The body is not encoded as its headers say; where it ends is not known, so the connection is of no more use."""


class LateBody(Exception):
    """The body has not come in time."""


def fault_of(error: BaseException) -> Fault:
    """What a client is told of `error`; of a group, its first."""
    match error:
        case BaseExceptionGroup():
            return fault_of(error.exceptions[0])
        case UnknownModel():
            return Fault(404, error.message, error.param)
        case InvalidRequest():
            return Fault(400, error.message, error.param)
        case Unauthorized():
            return Fault(
                401, "a valid API key is needed: Authorization: Bearer KEY", None, {"WWW-Authenticate": "Bearer"}
            )
        case UnreadableBody():
            message = "the body does not have the Content-Encoding or Transfer-Encoding that its headers name"
            return Fault(400, message, None, {"Connection": "close"})
        case LateBody():
            return Fault(408, "the request did not come in time", None, {"Connection": "close"})
        case Overloaded():
            return Fault(429, error.message, None, {"Retry-After": str(max(math.ceil(error.retry_after), 1))})
        case Unavailable():
            return Fault(503, str(error), None, {"Retry-After": str(SOON)})
        case EngineFailure():
            return Fault(500, str(error))
        case web.HTTPException():
            return _http_fault(error)
    logger.error("a request failed by a bug", exc_info=error)
    return Fault(500, "internal error; the server's log has more under this request's id")


def body(fault: Fault) -> bytes:
    """The JSON object of a fault."""
    param = None if fault.param is None else _cut(fault.param, PARAM)
    message = _cut(fault.message, MESSAGE)
    error = {"message": message, "type": _type(fault.status), "param": param, "code": fault.status}
    return msgspec.json.encode({"error": error})


def respond(fault: Fault) -> web.Response:
    """The fault as a whole answer."""
    return web.Response(
        status=fault.status, body=body(fault), content_type="application/json", headers=dict(fault.headers)
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _type(status: int) -> str:
    return TYPES.get(status, TYPES[500] if status >= 500 else TYPES[400])


def _http_fault(error: web.HTTPException) -> Fault:
    match error:
        case web.HTTPNotFound():
            return Fault(404, "there is nothing at this path")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return Fault(405, f"this path takes only {allowed}", None, {"Allow": allowed})
        case web.HTTPRequestEntityTooLarge():
            return Fault(413, "the body is longer than this server takes (--max-body-size)")
    return Fault(error.status, error.reason or "")

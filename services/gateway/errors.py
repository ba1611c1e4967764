"""Makes all error responses of the API. Every refusal and failure has the same fields:

    {"error": {"message": ..., "type": ..., "param": ..., "code": <HTTP status>}}

`to_api_error` translates exceptions. One that it does not know is a bug: it gives status 500, and a traceback in the
log.
"""

import logging
import math
from collections.abc import Mapping

import msgspec
from aiohttp import web
from msgspec import Struct

from services.gateway.api_responses import Error, ErrorResponse
from shared.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable
from shared.log_format import of_request

logger = logging.getLogger(__name__)

TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

MAX_MESSAGE = 500  # characters; a message may quote the client at any length, as a template's error does
MAX_PARAM = 100  # characters

UNAVAILABLE_RETRY_AFTER = 1  # seconds after which a client may try an unavailable server again


class ApiError(Struct, frozen=True):
    """An error as a client sees it."""

    status: int
    message: str
    param: str | None = None
    headers: Mapping[str, str] = {}


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""


class Unauthorized(Exception):
    """The request carries no valid API key."""


class UnreadableBody(Exception):
    """The body is not encoded as its headers say. Its end is unknown, so the connection cannot be reused."""


class BodyTimeout(Exception):
    """The body has not arrived within `limit` seconds."""

    def __init__(self, limit: float) -> None:
        super().__init__(limit)
        self.limit = limit


class BodyTooLong(Exception):
    """The body has more than `limit` bytes, `size` of them as far as that is known."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size, self.limit = size, limit


def to_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """Return the API error that a client gets for `error`, or for the first of a group.

    A bug is logged under `request_id`.
    """
    match error:
        case BaseExceptionGroup():
            return to_api_error(error.exceptions[0], request_id)
        case UnknownModel():
            return ApiError(404, error.message, error.param)
        case InvalidRequest():
            return ApiError(400, error.message, error.param)
        case Unauthorized():
            message = "a valid API key is needed: Authorization: Bearer KEY"
            return ApiError(401, message, None, {"WWW-Authenticate": "Bearer"})
        case UnreadableBody():
            message = "the body does not have the Content-Encoding or Transfer-Encoding that its headers name"
            return ApiError(400, message, None, {"Connection": "close"})
        case BodyTimeout():
            message = f"the request did not come in time: its body may take {error.limit:g} s"
            return ApiError(408, message, None, {"Connection": "close"})
        case BodyTooLong():
            limit = f"at most {error.limit} are allowed (--max-body-size)"
            return ApiError(413, f"the body has {error.size} bytes or more, but {limit}")
        case Overloaded():
            return ApiError(429, error.message, None, {"Retry-After": str(max(math.ceil(error.retry_after), 1))})
        case Unavailable():
            return ApiError(503, str(error), None, {"Retry-After": str(UNAVAILABLE_RETRY_AFTER)})
        case EngineFailure():
            return ApiError(500, str(error))
        case web.HTTPException():
            return _from_http_exception(error)
    logger.error("a request failed because of a bug", exc_info=error, extra=of_request(request_id))
    return ApiError(500, "internal error; the server's log has more under this request's id")


def error_body(error: ApiError) -> bytes:
    """Return the JSON of an error."""
    param = None if error.param is None else _shorten(error.param, MAX_PARAM)
    message = _shorten(error.message, MAX_MESSAGE)
    return msgspec.json.encode(ErrorResponse(Error(message, _type(error.status), param, error.status)))


def error_response(error: ApiError) -> web.Response:
    """Return an error as a whole response."""
    return web.Response(
        status=error.status, body=error_body(error), content_type="application/json", headers=dict(error.headers)
    )


def _shorten(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def _type(status: int) -> str:
    return TYPES.get(status, TYPES[500] if status >= 500 else TYPES[400])


def _from_http_exception(error: web.HTTPException) -> ApiError:
    match error:
        case web.HTTPNotFound():
            return ApiError(404, "there is nothing at this path")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return ApiError(405, f"this path takes only {allowed}", None, {"Allow": allowed})
    return ApiError(error.status, error.reason or "")

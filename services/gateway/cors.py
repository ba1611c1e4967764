"""CORS: tells browsers which web pages may read this API's responses (the Fetch standard's protocol).

It is off until `--allowed-origins` names some. A preflight, by which a browser asks whether it may send a request,
carries no API key and needs none. The headers are on every response, since a page has to see errors and streams too.
"""

from aiohttp import web
from aiohttp.typedefs import Handler

from services.gateway.config import GatewayConfig
from services.gateway.gateway import GATEWAY
from shared.errors import InvalidRequest, brief

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
"""The methods that "*" in `--allowed-methods` stands for. With credentials, browsers take "*" itself literally."""

SIMPLE_HEADERS = frozenset({"accept", "accept-language", "content-language", "content-type"})
"""Headers that are always allowed, if a preflight asks for them."""

MAX_AGE = 600  # seconds for which a browser may keep the response to a preflight


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser that asks whether it may send a request. Raise `InvalidRequest` if it may not."""
    config = request.app[GATEWAY].config
    method = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or method is None or "Origin" not in request.headers or not config.allowed_origins:
        return await handler(request)
    if _origin(config, request) is None:
        raise InvalidRequest(f"the origin {brief(request.headers['Origin'])} is not one of --allowed-origins")
    methods = METHODS if "*" in config.allowed_methods else config.allowed_methods
    if method not in methods:
        raise InvalidRequest(f"the method {brief(method)} is not one of --allowed-methods")
    headers = {"Access-Control-Allow-Methods": ", ".join(methods), "Access-Control-Max-Age": str(MAX_AGE)}
    if names := _headers(config, request.headers.get("Access-Control-Request-Headers", "")):
        headers["Access-Control-Allow-Headers"] = names
    return web.Response(headers=headers)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that say which pages may read a response."""
    config = request.app[GATEWAY].config
    if not config.allowed_origins:
        return
    origin = _origin(config, request)
    if origin != "*":
        response.headers.add("Vary", "Origin")  # otherwise a cache would give one origin's response to another
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        if config.allow_credentials:
            response.headers["Access-Control-Allow-Credentials"] = "true"


def _origin(config: GatewayConfig, request: web.Request) -> str | None:
    """Return the value of Access-Control-Allow-Origin, or None if the request has no allowed origin."""
    any_origin = "*" in config.allowed_origins
    if any_origin and not config.allow_credentials:
        return "*"
    origin = request.headers.get("Origin")
    if origin is None or not origin.isascii():  # a header could not hold it
        return None
    return origin if any_origin or origin in config.allowed_origins else None


def _headers(config: GatewayConfig, requested: str) -> str:
    """Return the value of Access-Control-Allow-Headers. Raise `InvalidRequest` if one of `requested` is not allowed."""
    allowed = {name.lower() for name in config.allowed_headers}
    names = {name.strip().lower() for name in requested.split(",")} - {""}
    if not requested.isascii() or ("*" not in allowed and names - allowed - SIMPLE_HEADERS):
        raise InvalidRequest(f"a header of {brief(requested)} is not one of --allowed-headers")
    return ", ".join(sorted(names))

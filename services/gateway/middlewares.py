"""Middlewares around every handler: request ids, error responses, API keys, counts and the log.

Their order is that of `MIDDLEWARES`. The outermost one gives the request its id and turns every exception into a
response, so that it also handles unknown paths and refusals by the others.
"""

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Sequence

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from services.gateway import cors, errors
from services.gateway.body import awaits_continue
from services.gateway.bounds import is_id
from services.gateway.gateway import GATEWAY, REQUEST_ID, ROUTE_PATHS, logged_id
from shared.log_format import of_request

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/openapi.json", "/docs", "/docs/{file}"})
"""Routes that need no API key, without --root-path. All others need one, unknown paths included. The description of
the API is the same for all servers, and a browser could send no key for it."""

UNLOGGED_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Routes that monitoring requests every few seconds. They are not logged, since they would hide other requests."""

NO_ROUTE = "none"  # where a route's path is wanted

CLIENT_CLOSED = 499  # only counted: there is no client left to send it to


@web.middleware
async def track_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, turn exceptions into responses, and count and log the result."""
    request[REQUEST_ID] = _request_id(request.headers.get("X-Request-Id", ""))
    started = time.monotonic()
    try:
        response = await handler(request)
    except asyncio.CancelledError:
        request.app[GATEWAY].metrics.count_response(route_of(request), CLIENT_CLOSED)
        raise
    except web.HTTPRedirection as redirect:
        response = web.Response(status=redirect.status, headers={"Location": redirect.headers["Location"]})
    except Exception as error:
        response = errors.error_response(errors.to_api_error(error, logged_id(request)))
    gateway = request.app[GATEWAY]
    gateway.metrics.count_response(route_of(request), response.status)
    if gateway.lifecycle.draining or awaits_continue(request):
        response.force_close()  # what a client that awaits 100-continue sends next may be its body or another request
    if gateway.config.enable_log_requests and route_of(request) not in UNLOGGED_PATHS:
        seconds, path = time.monotonic() - started, request.rel_url.raw_path
        extra = of_request(logged_id(request))
        logger.info("%s %s: %d in %.3f s", request.method, path, response.status, seconds, extra=extra)
    return response


@web.middleware
async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raise `Unauthorized` unless the request carries a valid key, or its route needs none."""
    keys = request.app[GATEWAY].config.api_key
    if keys and route_of(request) not in OPEN_PATHS and not _has_key(request.headers.get("Authorization", ""), keys):
        raise errors.Unauthorized
    return await handler(request)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the id to every response, and close the connection if nothing else marks the end of the response."""
    response.headers["X-Request-Id"] = request.get(REQUEST_ID) or _request_id("")
    if request.version < HttpVersion11 and response.content_length is None:
        response.force_close()  # HTTP/1.0 has no chunks: without a length, the response ends with the connection


strip_slash = web.normalize_path_middleware(
    append_slash=False, remove_slash=True, merge_slashes=False, redirect_class=web.HTTPTemporaryRedirect
)
"""Redirect from a path with a trailing slash, keeping the method and the body, as vLLM does."""

MIDDLEWARES = (track_request, cors.preflight, authorize, strip_slash)


def _request_id(requested: str) -> str:
    return requested if is_id(requested) else uuid.uuid4().hex


def route_of(request: web.Request) -> str:
    """Return the path of the request's route, without --root-path, or `NO_ROUTE` if it has no route."""
    resource = request.match_info.route.resource
    return NO_ROUTE if resource is None else request.app[ROUTE_PATHS][resource.canonical]


def _has_key(header: str, keys: Sequence[str]) -> bool:
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer":  # RFC 9110: the scheme's case does not matter
        return False
    token_bytes = token.strip().encode("utf-8", "surrogateescape")
    matches = [
        hmac.compare_digest(token_bytes, key.encode()) for key in keys
    ]  # all of them, so that the time reveals nothing
    return any(matches)

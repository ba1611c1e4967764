"""Middlewares around every handler: request ids, errors in one shape, API keys, counts and the log.

The order is that of `MIDDLEWARES`: the outermost gives the id and turns whatever is raised into an answer, so that
refusals of the others pass through it too, as do paths that do not exist.
"""

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Sequence

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from services.gateway import cors, expect, faults
from services.gateway.serving import GATEWAY, PATHS, REQUEST_ID

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""Routes that need no key, as they were declared; whatever does not resolve to one of them does."""

PROBES = frozenset({"/health", "/ping", "/metrics"})
"""Asked every few seconds by machines; in the log they would hide the requests of people."""

LONGEST_ID = 128
CLIENT_LEFT = 499  # in the counts only: there is nobody to send it to


@web.middleware
async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its id, and answers for whatever is raised."""
    request[REQUEST_ID] = _id(request.headers.get("X-Request-Id", ""))
    started = time.monotonic()
    try:
        response = await handler(request)
    except asyncio.CancelledError:
        request.app[GATEWAY].metrics.answered(_route(request), CLIENT_LEFT)
        raise
    except web.HTTPRedirection as redirect:
        response = web.Response(status=redirect.status, headers={"Location": redirect.headers["Location"]})
    except Exception as error:
        response = faults.respond(faults.fault_of(error))
    gateway = request.app[GATEWAY]
    gateway.metrics.answered(_route(request), response.status)
    if gateway.lifecycle.draining or expect.awaits_continue(request):
        response.force_close()  # a client that awaits it may send its body now, or its next request
    if gateway.config.enable_log_requests and _route(request) not in PROBES:
        took, path = time.monotonic() - started, request.rel_url.raw_path
        logger.info("%s %s %s: %d in %.3f s", request[REQUEST_ID], request.method, path, response.status, took)
    return response


@web.middleware
async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets through what carries a key, or needs none."""
    keys = request.app[GATEWAY].config.api_key
    if keys and _route(request) not in OPEN_PATHS and not _carries(request.headers.get("Authorization", ""), keys):
        raise faults.Unauthorized
    return await handler(request)


async def sign(request: web.Request, response: web.StreamResponse) -> None:
    """Write the id on every answer, streams included, and close the connection where nothing else marks its end."""
    response.headers["X-Request-Id"] = request.get(REQUEST_ID) or _id("")
    if request.version < HttpVersion11 and response.content_length is None:
        response.force_close()  # HTTP/1.0 has no chunks: without a length, the answer ends with the connection


without_slash = web.normalize_path_middleware(
    append_slash=False, remove_slash=True, merge_slashes=False, redirect_class=web.HTTPTemporaryRedirect
)
"""Redirects from a path with a slash too many at its end, with the method and body kept, as vLLM does."""

MIDDLEWARES = (answer, cors.preflight, authorize, without_slash)


def _id(given: str) -> str:
    usable = 0 < len(given) <= LONGEST_ID and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex


def _route(request: web.Request) -> str:
    """Return the declared path that the request resolved to, without --root-path; 'none' if there is no such path."""
    resource = request.match_info.route.resource
    return "none" if resource is None else request.app[PATHS][resource.canonical]


def _carries(header: str, keys: Sequence[str]) -> bool:
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer":  # its case does not matter, by RFC 9110
        return False
    sent = given.strip().encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(sent, key.encode()) for key in keys]  # all of them, so that time tells nothing
    return any(matches)

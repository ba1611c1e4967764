"""Makes the HTTP application: its routes, and the handlers of those that do not generate."""

import time
from collections.abc import Sequence
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from services.gateway import cors, errors, ignored_fields, middlewares
from services.gateway.body import check_expect
from services.gateway.chat import chat_completions
from services.gateway.completions import completions
from services.gateway.gateway import GATEWAY, ROUTE_PATHS, Gateway
from shared.errors import InvalidRequest, Unavailable, brief

STARTED = int(time.time())  # the API's creation time of the model
MAX_DIGITS = 9  # of a number in a query


def make_app(gateway: Gateway, outer: Sequence[Middleware] = ()) -> web.Application:
    """Return the HTTP application of a gateway. The caller starts and stops the gateway's backend.

    `outer` are middlewares around the others.
    """
    app = web.Application(middlewares=(*outer, *middlewares.MIDDLEWARES))
    app[GATEWAY] = gateway
    app.on_response_prepare.extend([middlewares.add_headers, cors.add_headers, ignored_fields.add_header])
    app[ROUTE_PATHS] = {}
    for root in dict.fromkeys(["", gateway.config.root_path.rstrip("/")]):
        for route in app.add_routes(_routes(root)):
            if route.resource is not None:
                app[ROUTE_PATHS][route.resource.canonical] = route.resource.canonical[len(root) :]
    return app


def _routes(root: str) -> list[web.RouteDef]:
    return [
        web.post(f"{root}/v1/chat/completions", _running(chat_completions), expect_handler=check_expect),
        web.post(f"{root}/v1/completions", _running(completions), expect_handler=check_expect),
        web.get(f"{root}/v1/models", list_models),
        web.get(root + "/v1/models/{model:.*[^/]}", retrieve_model),
        web.get(f"{root}/health", health),
        web.get(f"{root}/ping", health),
        web.post(f"{root}/ping", health, expect_handler=check_expect),
        web.get(f"{root}/version", show_version),
        web.get(f"{root}/metrics", metrics),
    ]


def _running(handler: Handler) -> Handler:
    """Return a handler whose requests are running ones of the gateway, from before their bodies are read."""

    @wraps(handler)
    async def run(request: web.Request) -> web.StreamResponse:
        with request.app[GATEWAY].lifecycle.running():
            return await handler(request)

    return run


async def list_models(request: web.Request) -> web.Response:
    """Return a model card for each served name."""
    gateway = request.app[GATEWAY]
    return web.json_response({"object": "list", "data": [_model_card(gateway, name) for name in gateway.model.names]})


async def retrieve_model(request: web.Request) -> web.Response:
    """Return the model card of one served name. Raise `UnknownModel` for other names."""
    gateway, name = request.app[GATEWAY], request.match_info["model"]
    gateway.model.check(name)
    return web.json_response(_model_card(gateway, name))


async def health(request: web.Request) -> web.Response:
    """Return an empty 200 if some engine can make progress; otherwise, or while draining, 503 with the reason.

    With `?engines=N`, that many must. With `?engines=0`, it is 200 if this gateway takes requests: while no engine is
    ready, they wait here.
    """
    count = request.query.get("engines", "1")
    if not count.isdecimal() or len(count) > MAX_DIGITS:
        raise InvalidRequest(f"engines must be a number of at most {MAX_DIGITS} digits, got {brief(count)}", "engines")
    try:
        request.app[GATEWAY].check_ready(int(count))
    except Unavailable as error:
        return errors.error_response(errors.to_api_error(error))
    return web.Response()


async def show_version(request: web.Request) -> web.Response:
    """Return the version of this server."""
    return web.json_response({"version": _version()})


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics in Prometheus' text format."""
    data, content_type = request.app[GATEWAY].metrics.render()
    return web.Response(body=data, headers={"Content-Type": content_type})


def _model_card(gateway: Gateway, name: str) -> dict[str, Any]:
    welcome = gateway.backend.welcome
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "quire",
        "root": gateway.model.root,
        "parent": None,
        "max_model_len": None if welcome is None else welcome.max_model_len,
    }


def _version() -> str:
    try:
        return version("quire-server")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed

"""The routes of a gateway, and the small handlers."""

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiohttp import web

from services.gateway import access, cors, expect, faults, ignored
from services.gateway.chat import chat_completions
from services.gateway.completions import completions
from services.gateway.serving import GATEWAY, PATHS, Gateway
from shared.errors import Unavailable

STARTED = int(time.time())


def make_app(gateway: Gateway) -> web.Application:
    """The HTTP application of a gateway. Its backend is the caller's to start and stop."""
    app = web.Application(middlewares=access.MIDDLEWARES)
    app[GATEWAY] = gateway
    app.on_response_prepare.extend([access.sign, cors.sign, ignored.sign])
    app[PATHS] = {}
    for root in dict.fromkeys(["", gateway.config.root_path.rstrip("/")]):
        for route in app.add_routes(_routes(root)):
            if route.resource is not None:
                app[PATHS][route.resource.canonical] = route.resource.canonical[len(root) :]
    return app


def _routes(root: str) -> list[web.RouteDef]:
    return [
        web.post(f"{root}/v1/chat/completions", chat_completions, expect_handler=expect.check),
        web.post(f"{root}/v1/completions", completions, expect_handler=expect.check),
        web.get(f"{root}/v1/models", models),
        web.get(root + "/v1/models/{model:.*[^/]}", model),
        web.get(f"{root}/health", health),
        web.get(f"{root}/ping", health),
        web.post(f"{root}/ping", health, expect_handler=expect.check),
        web.get(f"{root}/version", show_version),
        web.get(f"{root}/metrics", metrics),
    ]


async def models(request: web.Request) -> web.Response:
    """The served names."""
    gateway = request.app[GATEWAY]
    return web.json_response({"object": "list", "data": [_card(gateway, name) for name in gateway.model.names]})


async def model(request: web.Request) -> web.Response:
    """One served name."""
    gateway, name = request.app[GATEWAY], request.match_info["model"]
    gateway.model.check(name)
    return web.json_response(_card(gateway, name))


async def health(request: web.Request) -> web.Response:
    """Empty 200 if some engine can make progress; 503 if none can, or this gateway is draining, and which of these."""
    try:
        request.app[GATEWAY].check_ready()
    except Unavailable as error:
        return faults.respond(faults.fault_of(error))
    return web.Response()


async def show_version(request: web.Request) -> web.Response:
    """The version of this server."""
    return web.json_response({"version": _version()})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' exposition."""
    data, content_type = request.app[GATEWAY].metrics.render()
    return web.Response(body=data, headers={"Content-Type": content_type})


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
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

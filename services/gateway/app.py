"""Makes the HTTP application: its routes, and the handlers of those that do not generate."""

import time
from collections.abc import Sequence
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from msgspec.structs import replace

from services.gateway import cors, errors, ignored_fields, middlewares
from services.gateway.adapters import load_lora_adapter, unload_lora_adapter
from services.gateway.api_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    ResponsesRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    UnloadAdapterRequest,
)
from services.gateway.api_responses import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionResponse,
    CompletionStreamResponse,
    DetokenizeResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    ResetResponse,
    TokenizeResponse,
    VersionResponse,
)
from services.gateway.body import check_expect
from services.gateway.chat import chat_completions
from services.gateway.completions import completions
from services.gateway.config import GatewayConfig
from services.gateway.docs_page import show_docs, show_file
from services.gateway.gateway import GATEWAY, ROUTE_PATHS, Gateway
from services.gateway.openapi import DESCRIPTION, Description, Route, show_openapi
from services.gateway.response import json_response
from services.gateway.responses import responses
from services.gateway.responses_objects import Response, StreamEvent
from services.gateway.tokenization import detokenize, tokenize, tokenizer_info
from shared.errors import InvalidRequest, Unavailable, brief
from shared.protocol import AdapterInfo

STARTED = int(time.time())  # the API's creation time of the model
GENERATION, TOKENS, MODELS, SERVER = "Generation", "Tokens", "Models", "Server"  # groups of routes
MAX_DIGITS = 9  # of a number in a query

ENGINES = {
    "name": "engines",
    "in": "query",
    "description": "Number of engines that must be able to make progress.",
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1, "default": 1},
}
MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]  # of an example


def make_app(gateway: Gateway, outer: Sequence[Middleware] = ()) -> web.Application:
    """Return the HTTP application of a gateway. The caller starts and stops the gateway's backend.

    `outer` are middlewares around the others.
    """
    app = web.Application(middlewares=(*outer, *middlewares.MIDDLEWARES))
    app[GATEWAY] = gateway
    app.on_response_prepare.extend([middlewares.add_headers, cors.add_headers, ignored_fields.add_header])
    app[ROUTE_PATHS] = {}
    routes, root_path = make_routes(gateway.config), gateway.config.root_path.rstrip("/")
    with_keys = bool(gateway.config.api_key)
    app[DESCRIPTION] = Description(routes, version=_version(), root_path=root_path, with_keys=with_keys)
    for root in dict.fromkeys(["", root_path]):
        for route in app.add_routes([_definition(route, root) for route in routes]):
            if route.resource is not None:
                app[ROUTE_PATHS][route.resource.canonical] = route.resource.canonical[len(root) :]
    return app


def make_routes(config: GatewayConfig) -> list[Route]:
    """Return the routes, each of which is served with and without --root-path."""
    routes = [
        Route(
            method="POST",
            path="/v1/chat/completions",
            handler=_running(chat_completions),
            tag=GENERATION,
            bodies=(ChatRequest,),
            example={"messages": MESSAGES, "max_tokens": 32},
            answer=ChatCompletionResponse,
            chunk=ChatCompletionStreamResponse,
            errors=(429, 500, 503),
        ),
        Route(
            method="POST",
            path="/v1/responses",
            handler=_running(responses),
            tag=GENERATION,
            bodies=(ResponsesRequest,),
            example={"input": MESSAGES, "max_output_tokens": 32},
            answer=Response,
            chunk=StreamEvent,
            ends_in_done=False,
            errors=(429, 500, 503),
        ),
        Route(
            method="POST",
            path="/v1/completions",
            handler=_running(completions),
            tag=GENERATION,
            bodies=(CompletionRequest,),
            example={"prompt": "Once upon a time", "max_tokens": 32},
            answer=CompletionResponse,
            chunk=CompletionStreamResponse,
            errors=(429, 500, 503),
        ),
        Route(
            method="POST",
            path="/tokenize",
            handler=_running(tokenize),
            tag=TOKENS,
            bodies=(TokenizeCompletionRequest, TokenizeChatRequest),
            example={"messages": MESSAGES},
            answer=TokenizeResponse,
            errors=(429, 503),
        ),
        Route(
            method="POST",
            path="/detokenize",
            handler=_running(detokenize),
            tag=TOKENS,
            bodies=(DetokenizeRequest,),
            example={"tokens": [1, 2, 3]},
            answer=DetokenizeResponse,
            errors=(429, 503),
        ),
        Route(method="GET", path="/v1/models", handler=list_models, tag=MODELS, answer=ModelList),
        Route(
            method="GET",
            path="/v1/models/{model:.*[^/]}",
            handler=retrieve_model,
            tag=MODELS,
            answer=ModelCard,
            errors=(404,),
        ),
        Route(method="GET", path="/load", handler=load, tag=SERVER, answer=LoadResponse),
        Route(method="GET", path="/version", handler=show_version, tag=SERVER, answer=VersionResponse),
        Route(method="GET", path="/metrics", handler=metrics, tag=SERVER, content_type="text/plain"),
    ]
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        routes.append(
            Route(
                method=method,
                path=path,
                handler=health,
                tag=SERVER,
                content_type="",
                parameters=[ENGINES],
                errors=(400, 503),
            )
        )
    if config.enable_reset_prefix_cache:
        routes.append(
            Route(
                method="POST",
                path="/reset_prefix_cache",
                handler=reset_prefix_cache,
                tag=SERVER,
                answer=ResetResponse,
                errors=(503,),
            )
        )
    if config.enable_lora_runtime_updates:
        for path, handler, body in (
            ("/v1/load_lora_adapter", load_lora_adapter, LoadAdapterRequest),
            ("/v1/unload_lora_adapter", unload_lora_adapter, UnloadAdapterRequest),
        ):
            routes.append(
                Route(
                    method="POST",
                    path=path,
                    handler=handler,
                    tag=MODELS,
                    bodies=(body,),
                    content_type="text/plain",
                    errors=(404, 503),
                )
            )
    if config.enable_tokenizer_info_endpoint:
        routes.append(
            Route(method="GET", path="/tokenizer_info", handler=tokenizer_info, tag=TOKENS, answer=dict[str, Any])
        )
    if not config.disable_fastapi_docs:
        routes += [
            Route(method="GET", path="/openapi.json", handler=show_openapi, tag=SERVER, answer=dict[str, Any]),
            Route(method="GET", path="/docs", handler=show_docs, tag=SERVER, content_type="text/html"),
            Route(method="GET", path="/docs/{file:[^/]+}", handler=show_file, tag=SERVER, is_shown=False),
        ]
    return routes


def _definition(route: Route, root: str) -> web.RouteDef:
    if route.method == "GET":
        return web.get(root + route.path, route.handler)
    return web.post(root + route.path, route.handler, expect_handler=check_expect)


def _running(handler: Handler) -> Handler:
    """Return a handler whose requests are running ones of the gateway, from before their bodies are read."""

    @wraps(handler)
    async def run(request: web.Request) -> web.StreamResponse:
        with request.app[GATEWAY].lifecycle.running():
            return await handler(request)

    return run


async def list_models(request: web.Request) -> web.Response:
    """Return a model card for each served name and each adapter."""
    gateway = request.app[GATEWAY]
    cards = [_model_card(gateway, name) for name in gateway.model.names]
    cards += [_adapter_card(gateway, adapter) for adapter in gateway.backend.adapters.values()]
    return json_response(ModelList("list", cards))


async def retrieve_model(request: web.Request) -> web.Response:
    """Return the model card of one served name or adapter; other names get 404."""
    gateway, name = request.app[GATEWAY], request.match_info["model"]
    gateway.model.check(name, gateway.backend.adapters)
    if name not in gateway.model.names:
        return json_response(_adapter_card(gateway, gateway.backend.adapters[name]))
    return json_response(_model_card(gateway, name))


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
    return json_response(VersionResponse(_version()))


async def load(request: web.Request) -> web.Response:
    """Return the number of requests that this gateway process is working on."""
    return json_response(LoadResponse(request.app[GATEWAY].lifecycle.num_running))


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics in Prometheus' text format."""
    data, content_type = request.app[GATEWAY].metrics.render()
    return web.Response(body=data, headers={"Content-Type": content_type})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Have every engine forget its cached blocks. Raise `Unavailable` if one does not answer that it has."""
    await request.app[GATEWAY].backend.reset_prefix_cache()
    return json_response(ResetResponse(success=True))


def _model_card(gateway: Gateway, name: str) -> ModelCard:
    welcome = gateway.backend.welcome
    return ModelCard(
        id=name,
        object="model",
        created=STARTED,
        owned_by="quire",
        root=gateway.model.root,
        parent=None,
        max_model_len=None if welcome is None else welcome.max_model_len,
    )


def _adapter_card(gateway: Gateway, adapter: AdapterInfo) -> ModelCard:
    card = _model_card(gateway, adapter.name)
    return replace(card, root=adapter.path, parent=gateway.model.name)


def _version() -> str:
    try:
        return version("quire-server")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed

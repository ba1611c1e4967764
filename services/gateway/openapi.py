"""GET /openapi.json: the API in the words of OpenAPI 3.1, made from its routes and from the structs of its bodies.

The structs that decode requests give the types of their fields, `field_schemas.py` the rest. `api_responses.py` has the
answers. A handler's docstring describes its route.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct

from services.gateway.api_requests import (
    GenerationRequest,
    ResponsesRequest,
    StreamOptions,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from services.gateway.api_responses import ErrorResponse
from services.gateway.field_schemas import FIELDS, PROMPT_FIELDS, RESPONSES_FIELDS
from services.gateway.ignored_fields import HEADER
from services.gateway.middlewares import OPEN_PATHS
from services.gateway.threads import run_in_thread
from services.gateway.unsupported_fields import HINTS
from shared.params import RepetitionDetectionParams

Json = dict[str, Any]

JSON = "application/json"
EVENTS = "text/event-stream"
REF = "#/components/schemas/{name}"

ERRORS = {
    400: "Something in the request is wrong.",
    401: "There is no valid API key.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body has a Content-Encoding that is not supported.",
    417: "The request expects something else than 100-continue.",
    429: "The queue is full.",
    500: "The server has failed.",
    503: "No engine can take the request now.",
}
OF_BODIES = (400, 404, 408, 413, 415, 417)  # statuses that any route with a body may have
RETRIED = (429, 503)  # statuses after which a client should come again

INTRODUCTION = (
    "OpenAI's API, with the fields that vLLM adds. Fields of these two that would change the answer and are not listed "
    f"here are refused by name. Unknown fields are ignored, and the answer's header {HEADER} names them."
)


class Route(Struct, frozen=True, kw_only=True):
    """A route of the API: what serves it, and what `/openapi.json` says of it beside the handler's docstring."""

    method: str
    path: str  # without --root-path, and with aiohttp's patterns
    handler: Handler
    tag: str  # the group in which it is shown
    bodies: tuple[type[Struct], ...] = ()  # types of which the JSON of a request's body is one
    example: Mapping[str, Any] | None = None  # of a body
    answer: Any = None  # the type of the JSON of status 200; None: it is not JSON
    content_type: str = JSON  # of status 200; empty: it has no body
    chunk: Any = None  # the type of an event's data, if the answer may be a stream
    ends_in_done: bool = True  # whether the last event of a stream is `[DONE]`
    parameters: Sequence[Mapping[str, Any]] = ()  # of the query
    errors: tuple[int, ...] = ()  # statuses of refusals beside those of all routes with a body
    is_shown: bool = True


class Description:
    """The description of a gateway's routes. If there are API keys, it says where they are needed."""

    def __init__(self, routes: Sequence[Route], *, version: str, root_path: str, with_keys: bool) -> None:
        self._make = partial(_document, routes, version, root_path, with_keys)

    @cached_property
    def json(self) -> bytes:
        """Return the whole description. Making it takes some 20 ms, the first time."""
        return self._make()


DESCRIPTION = web.AppKey("description", Description)


async def show_openapi(request: web.Request) -> web.Response:
    """Return this description of the API."""
    return web.Response(body=await run_in_thread(lambda: request.app[DESCRIPTION].json), content_type=JSON)


def _document(routes: Sequence[Route], version: str, root_path: str, with_keys: bool) -> bytes:
    shown = [route for route in routes if route.is_shown]
    schemas, components = _schemas(shown)
    paths: dict[str, Json] = {}
    for route in shown:
        path = re.sub(r"\{(\w+):[^{}]*\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas, with_keys)
    result: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version, "description": INTRODUCTION},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {str(status): _error(status) for status in ERRORS},
            "headers": _HEADERS,
        },
    }
    if root_path:
        result["servers"] = [{"url": root_path}]
    if with_keys:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(result)


def _operation(route: Route, path: str, schemas: Mapping[Any, Json], with_keys: bool) -> Json:
    summary, _, rest = " ".join((route.handler.__doc__ or "").split()).partition(". ")
    operation: Json = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", path)]),
        "summary": summary.removesuffix("."),
        "tags": [route.tag],
        "responses": {"200": _success(route, schemas)},
    }
    if rest:
        operation["description"] = rest
    parameters = [_path_parameter(name) for name in re.findall(r"\{(\w+)\}", path)] + list(route.parameters)
    if parameters:
        operation["parameters"] = parameters
    if route.bodies:
        operation["requestBody"] = _body(route, schemas)
    statuses = {*route.errors, *(OF_BODIES if route.bodies else ())}
    if with_keys and route.path not in OPEN_PATHS:
        operation["security"] = [{"key": []}]
        statuses.add(401)
    for status in sorted(statuses):
        operation["responses"][str(status)] = {"$ref": f"#/components/responses/{status}"}
    return operation


def _body(route: Route, schemas: Mapping[Any, Json]) -> Json:
    types = [schemas[body] for body in route.bodies]
    content: Json = {"schema": types[0] if len(types) == 1 else {"anyOf": types}}
    if route.example is not None:
        content["example"] = route.example
    return {"required": True, "content": {JSON: content}}


def _success(route: Route, schemas: Mapping[Any, Json]) -> Json:
    response: Json = {"description": "Success.", "headers": _headers("X-Request-Id")}
    if route.bodies:
        response["headers"] |= _headers(HEADER)
    if route.content_type:
        schema = {"type": "string"} if route.answer is None else schemas[route.answer]
        response["content"] = {route.content_type: {"schema": schema}}
    if route.chunk is not None:
        response["description"] = "The whole answer, or a stream of events."
        response["content"][EVENTS] = {"schema": _event(route, schemas)}
    return response


def _event(route: Route, schemas: Mapping[Any, Json]) -> Json:
    """Return the schema of one event: OpenAPI 3.1 leaves that open, and this is how its readers take it."""
    data: Json = {"type": "string", "contentMediaType": JSON, "contentSchema": schemas[route.chunk]}
    if not route.ends_in_done:
        return {
            "type": "object",
            "required": ["event", "data"],
            "properties": {"event": {"type": "string"}, "data": data},
        }
    data["contentSchema"] = {"anyOf": [data["contentSchema"], _ERROR_SCHEMA]}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data], "description": "The last one is `[DONE]`."}},
    }


def _error(status: int) -> Json:
    headers = _headers("X-Request-Id", *(["Retry-After"] if status in RETRIED else []))
    return {"description": ERRORS[status], "headers": headers, "content": {JSON: {"schema": _ERROR_SCHEMA}}}


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


_ERROR_SCHEMA = {"$ref": REF.format(name=ErrorResponse.__name__)}
_HEADERS: Mapping[str, Json] = {
    "X-Request-Id": {"description": "The request's own id, or a new one.", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds after which to come again.", "schema": {"type": "integer"}},
    HEADER: {"description": "Fields of the request that are ignored.", "schema": {"type": "string"}},
}


def _headers(*names: str) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _schemas(routes: Sequence[Route]) -> tuple[dict[Any, Json], dict[str, Json]]:
    """Return the schemas of all types of bodies and answers, by type, and the components that these refer to."""
    bodies = list(dict.fromkeys(body for route in routes for body in route.bodies))
    answers = [answer for route in routes for answer in (route.answer, route.chunk) if answer is not None]
    types = list(dict.fromkeys([*bodies, *answers, ErrorResponse]))
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    described: list[type[Struct]] = [*bodies, StreamOptions, RepetitionDetectionParams]
    for kind in described:
        _describe(components, kind)
    return dict(zip(types, schemas, strict=True)), {name: _simplify(schema) for name, schema in components.items()}


def _describe(components: Mapping[str, Any], request_type: type[Struct]) -> None:
    """Add to a request's schema what is said of its fields, and the fields that are taken and have no effect.

    The schemas of prompts that are only tokenized have nothing but the fields that make a difference.
    """
    properties = components.get(request_type.__name__, {}).get("properties", {})
    own = RESPONSES_FIELDS if request_type is ResponsesRequest else {}
    for name, schema in properties.items():
        schema.update(own.get(name) or FIELDS[name])
    if issubclass(request_type, TokenizeChatRequest | TokenizeCompletionRequest):
        for name in properties.keys() - PROMPT_FIELDS:
            del properties[name]
    elif issubclass(request_type, GenerationRequest):
        properties.update({name: {"description": "Taken, and without effect."} for name in sorted(HINTS)})


def _simplify(schema: Any) -> Any:
    """Return a schema in which whole numbers are integers only: to JSON Schema 5.0 is one too."""
    if isinstance(schema, list):
        return [_simplify(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    simple = {name: _simplify(value) for name, value in schema.items()}
    choices = simple.get("anyOf", [])
    if {"type": "integer"} in choices:
        simple["anyOf"] = [choice for choice in choices if choice != {"type": "number"}]
    return simple

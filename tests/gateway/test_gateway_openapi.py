"""Tests of /openapi.json and /docs. That answers are as described is also checked wherever tests get answers."""

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct

from services.gateway.api_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    StreamOptions,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from services.gateway.field_schemas import FIELDS, PROMPT_FIELDS, RESPONSES_FIELDS
from services.gateway.middlewares import OPEN_PATHS
from services.gateway.unsupported_fields import HINTS, NEUTRAL_VALUES
from shared.params import RepetitionDetectionParams
from tests.gateway.documented import check_answer, check_event
from tests.gateway.fakes import Client, FakeBackend, events, serve
from tests.gateway.test_gateway_beam_search import BeamBackend

CHOICES = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
"""The routes whose answers have choices."""
GENERATING: dict[str, type[Struct]] = {**CHOICES, "/v1/responses": ResponsesRequest}
REQUESTS = (*CHOICES.values(), TokenizeChatRequest, TokenizeCompletionRequest, DetokenizeRequest)
NESTED = (StreamOptions, RepetitionDetectionParams)
"""The objects within requests whose fields are described."""
LIMITED = {"stop", "stop_token_ids", "logit_bias"}
MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}

NEEDED: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "n": {"max_tokens": 1},
    "length_penalty": {"use_beam_search": True},
}
"""What has to stand beside a field of the other two."""


async def description(**settings: Any) -> Any:
    async with serve(**settings) as client, client.get("/openapi.json") as response:
        assert response.content_type == "application/json"
        return await response.json()


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


@pytest.mark.parametrize("settings", [{}, {"enable_tokenizer_info_endpoint": True, "root_path": "/llm"}])
async def test_every_route_is_described_and_no_other(settings: dict[str, Any]) -> None:
    async with serve(**settings) as client:
        served = {
            (route.method, route.resource.canonical)
            for route in client.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    document = await description(**settings)
    root = settings.get("root_path", "")
    described = {(method, path) for method, path, _ in operations(document)} | {("GET", "/docs/{file}")}
    assert served == described | {(method, root + path) for method, path in described}
    assert document.get("servers") == ([{"url": root}] if root else None)


async def test_every_operation_has_a_name_of_its_own_and_a_summary() -> None:
    found = list(operations(await description()))
    assert len({operation["operationId"] for _, _, operation in found}) == len(found)
    for _, _, operation in found:
        assert operation["summary"]
        assert not re.search(r"`\w+Error`|Raise", operation["summary"] + operation.get("description", ""))


async def test_references_lead_somewhere() -> None:
    document = await description()

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (item for name, item in value.items() if name == "$ref")
            for item in value.values():
                yield from references(item)
        elif isinstance(value, list):
            for item in value:
                yield from references(item)

    found = set(references(document))
    assert len(found) > 20
    for reference in found:
        target = document
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]


def test_every_field_is_described_and_no_unknown_one() -> None:
    fields = {name for kind in (*REQUESTS, *NESTED) for name in kind.__struct_fields__}
    assert fields <= set(FIELDS)
    assert set(FIELDS) <= fields | set(NEUTRAL_VALUES) | HINTS
    own = set(ResponsesRequest.__struct_fields__)
    assert own - set(FIELDS) <= set(RESPONSES_FIELDS) <= own
    assert all(schema["description"] for schema in (*FIELDS.values(), *RESPONSES_FIELDS.values()))


async def test_properties_are_the_structs_fields_and_the_hints() -> None:
    schemas = (await description())["components"]["schemas"]
    for request in (*REQUESTS, ResponsesRequest):
        names = set(request.__struct_fields__)
        if request in (ChatRequest, CompletionRequest):
            names |= HINTS
        elif request not in (DetokenizeRequest, ResponsesRequest):
            names &= PROMPT_FIELDS
        properties = schemas[request.__name__]["properties"]
        assert set(properties) == names
        assert all(schema["description"] for schema in properties.values())
    for nested in NESTED:
        properties = schemas[nested.__name__]["properties"]
        assert set(properties) == set(nested.__struct_fields__)
        assert all(schema.get("description") for schema in properties.values())
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert schemas["ChatRequest"]["properties"]["max_tokens"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert {"type": "number"} in schemas["ChatRequest"]["properties"]["temperature"]["anyOf"]


def beyond(schema: dict[str, Any], is_whole: bool) -> list[Any]:
    """Return values just beyond the bounds of a number."""
    step = 1 if is_whole else 0.01
    values = []
    if "minimum" in schema:
        values.append(schema["minimum"] - step)
    if "exclusiveMinimum" in schema:
        values.append(schema["exclusiveMinimum"])
    if "maximum" in schema:
        values.append(schema["maximum"] * 2 if schema["maximum"] > 1e20 else schema["maximum"] + step)
    return values


@pytest.mark.parametrize("path", MINIMAL)
async def test_bounds_of_numbers_are_those_that_are_enforced(path: str) -> None:
    """A value at a bound may be refused for another reason; it is not for this field alone."""
    async with serve(BeamBackend()) as client:
        schemas = (await (await client.get("/openapi.json")).json())["components"]["schemas"]
        num_bounds = 0
        for name, schema in schemas[GENERATING[path].__name__]["properties"].items():
            types = [choice.get("type") for choice in schema.get("anyOf", [])]
            if not {"integer", "number"} & set(types):
                continue
            for value in beyond(schema, "integer" in types):
                num_bounds += 1
                status, error = await client.refused(path, MINIMAL[path] | needed(path, name) | {name: value})
                assert (status, error["param"]) == (400, name), (name, value)
            for value in (schema.get("minimum"), schema.get("maximum")):
                if value is not None and not (name == "best_of" and value > 1):
                    await accepted(client, path, name, value)
    assert num_bounds > 15


def needed(path: str, name: str) -> dict[str, Any]:
    """Return what has to stand beside a field."""
    if (path, name) == ("/v1/responses", "top_logprobs"):
        return {"include": ["message.output_text.logprobs"]}
    return NEEDED.get(name, {})


async def accepted(client: Client, path: str, name: str, value: Any) -> None:
    """Check that a value of a field is not refused for its range."""
    async with client.post(path, json=MINIMAL[path] | needed(path, name) | {name: value}) as response:
        if response.status != 200:
            error = (await response.json())["error"]
            others = ("context", "max_tokens", "no parser of reasoning")
            assert any(reason in error["message"] for reason in others), (name, value, error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ""),
        ("stop", "x" * (FIELDS["stop"]["maxLength"] + 1)),
        ("stop", ["x"] * (FIELDS["stop"]["maxItems"] + 1)),
        ("stop", [""]),
        ("stop_token_ids", [1] * (FIELDS["stop_token_ids"]["maxItems"] + 1)),
        ("logit_bias", {str(id): 0 for id in range(FIELDS["logit_bias"]["maxProperties"] + 1)}),
        ("logit_bias", {"1": "x"}),
        ("response_format", {}),
        ("response_format", {"type": "x"}),
        ("structured_outputs", {"x": 1}),
        ("structured_outputs", {}),
        ("messages", []),
        ("messages", [{}]),
        ("messages", [{"role": "user", "content": 1}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]),
        ("tools", [{"type": "x", "function": {"name": "f"}}]),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": 1}}]),
        ("tool_choice", "x"),
        ("tool_choice", {"type": "function"}),
    ],
)
async def test_other_bounds_are_enforced_too(field: str, value: Any) -> None:
    async with serve() as client:
        status, error = await client.refused("/v1/chat/completions", MINIMAL["/v1/chat/completions"] | {field: value})
    assert status == 400
    assert error["param"] is not None
    assert error["param"].startswith(field)


async def test_examples_are_accepted() -> None:
    async with serve() as client:
        count = 0
        for method, path, operation in operations(await (await client.get("/openapi.json")).json()):
            if "requestBody" in operation:
                count += 1
                example = operation["requestBody"]["content"]["application/json"]["example"]
                async with client.request(method, path, json=example) as response:
                    assert response.status == 200, await response.text()
        assert count == 5


async def test_keys_are_described_where_they_are_needed() -> None:
    assert not any("security" in operation for _, _, operation in operations(await description()))
    async with serve(api_key=["secret"]) as client, client.get("/openapi.json") as response:
        document = await response.json()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for _, path, operation in operations(document):
        assert ("security" in operation) == ("401" in operation["responses"]) == (path not in OPEN_PATHS), path


@pytest.mark.parametrize("path", CHOICES)
async def test_a_form_that_is_not_described_is_noticed(path: str) -> None:
    """The checks of answers in all other tests can fail."""
    async with serve() as client:
        async with client.post(path, json=MINIMAL[path]) as response:
            answer = await response.json()
        async with client.post(path, json=MINIMAL[path] | {"stream": True}) as response:
            chunk = events(await response.text())[0]
    check_answer(path, answer)
    check_event(path, chunk)
    answer["choices"][0]["colour"] = None
    chunk["choices"][0]["colour"] = None
    with pytest.raises(AssertionError):
        check_answer(path, answer)
    with pytest.raises(AssertionError):
        check_event(path, chunk)


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    async with serve(api_key=["secret"], root_path="/llm") as client:
        for root in ("", "/llm"):
            async with client.get(f"{root}/docs") as response:
                assert (response.status, response.content_type) == (200, "text/html")
                page, policy = await response.text(), response.headers["Content-Security-Policy"]
            assert "//" not in page.replace("<!DOCTYPE", "")
            addresses = re.findall(r'(?:src|href|url)(?:=|: )"([^"]+)"', page)
            assert len(addresses) == 4
            for address in addresses:
                async with client.get(f"{root}/{address}") as response:
                    assert response.status == 200, address
                    assert len(await response.read()) > 100
            (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
            assert policy.startswith("default-src 'self'")
        for name in ("x.js", "index.html", "..%2f__init__.py", "swagger-ui.js"):
            assert (await client.get(f"/docs/{name}")).status == 404


async def test_both_can_be_turned_off() -> None:
    async with serve(disable_fastapi_docs=True) as client:
        for path in ("/openapi.json", "/docs", "/docs/swagger-ui.css"):
            assert (await client.get(path)).status == 404
        await client.complete(prompt="hi")


async def test_an_error_in_a_stream_is_as_described() -> None:
    backend = FakeBackend()
    backend.fail_at, backend.failure = 1, ValueError("bug")
    body = {"prompt": "hi", "stream": True}
    async with serve(backend) as client, client.post("/v1/completions", json=body) as response:
        data = events(await response.text())
    assert "error" in data[-1]
    for one in data:
        check_event("/v1/completions", one)

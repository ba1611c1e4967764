"""Tests of paths, methods, keys, ids and bodies: every error has one shape, and none is a 500."""

import asyncio
import gzip
import io
import json
import logging
import re
from typing import Any

import pytest
from yarl import URL

from services.gateway.api_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from services.gateway.middlewares import OPEN_PATHS
from shared.errors import EngineFailure
from tests.gateway.fakes import MODEL, Client, FakeBackend, error_of, serve
from tests.gateway.test_gateway_beam_search import BeamBackend
from tests.waiting import until

PATHS = ["/v1/completions", "/v1/chat/completions"]
KEY = {"Authorization": "Bearer secret"}


def routes(client: Client) -> list[tuple[str, str]]:
    """Return the method and path of every route."""
    app = client.server.app  # type: ignore[attr-defined]
    return [
        (route.method, route.resource.canonical.replace("{model:.+}", MODEL).replace("{model}", MODEL))
        for route in app.router.routes()
        if route.resource is not None
    ]


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "bearer wrong"}, {"Authorization": "Bearer"},
                {"Authorization": "Bearer Secret"}, {"Authorization": "Basic secret"}, {"Authorization": "secret"},
                {"Authorization": "Bearer secretsecret"}, {"X-Api-Key": "secret"}]
)  # fmt: skip
async def test_every_route_needs_the_key_but_for_a_written_list(headers: dict[str, str]) -> None:
    """GTW-01."""
    async with serve(api_key=["other", "secret"], enable_reset_prefix_cache=True) as client:
        assert len(routes(client)) >= 10
        for method, path in routes(client):
            async with client.request(method, path, headers=headers) as response:
                assert (response.status == 401) == (path not in OPEN_PATHS)
                if response.status == 401:
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    if method != "HEAD":
                        assert (await error_of(response))["type"] == "AuthenticationError"


@pytest.mark.parametrize(
    "path", ["//v1/models", "/V1/models", "/v1/models/", "/v1//models", "/%76%31/models", "/v1%2Fmodels", "/nowhere",
             "/", "/health/../v1/models", "/health%2f..%2fv1%2fmodels", "/health/", "//health", "/metrics?x=/v1/models",
             "/v1/models#/health"]
)  # fmt: skip
async def test_no_spelling_of_a_path_goes_round_the_key(path: str) -> None:
    """GTW-01."""
    async with serve(api_key=["secret"]) as client:
        url = URL(f"http://{client.host}:{client.port}{path}", encoded=True)
        async with client.session.get(url) as response:
            assert response.status == (200 if path.startswith("/metrics?") else 401)


async def test_a_key_opens_every_route() -> None:
    """GTW-01."""
    async with serve(api_key=["other", "secret"]) as client:
        for headers in (KEY, {"Authorization": "bearer other"}):
            assert (await client.get("/v1/models", headers=headers)).status == 200
        fields = {"prompt": "x"}
        assert (await client.post("/v1/completions", json=fields, headers=KEY)).status == 200


async def test_without_keys_nothing_is_locked() -> None:
    async with serve() as client:
        assert (await client.get("/v1/models")).status == 200


@pytest.mark.parametrize("requested_id", ["my-id-7", None, "x" * 129, "bad\tid"])
async def test_every_answer_has_a_request_id(requested_id: str | None) -> None:
    """GTW-06."""
    async with serve() as client:
        seen = set()
        asked: list[tuple[str, str, Any]] = [
            ("POST", "/v1/completions", {"prompt": "x"}),
            ("POST", "/v1/completions", {"prompt": "x", "stream": True}),
            ("POST", "/v1/completions", {"prompt": 1}),
            ("GET", "/nowhere", None),
            ("GET", "/v1/completions", None),
            ("GET", "/health", None),
        ]
        for method, path, body in asked:
            headers = {} if requested_id is None else {"X-Request-Id": requested_id}
            async with client.request(method, path, json=body, headers=headers) as response:
                seen.add(response.headers["X-Request-Id"])
        assert seen == {requested_id} if requested_id == "my-id-7" else len(seen) == len(asked)


async def test_the_id_is_in_the_answer_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """GTW-06."""
    caplog.set_level(logging.INFO)
    async with serve(enable_log_requests=True) as client:
        for path in ("/health", "/ping", "/metrics"):
            await client.get(path)
        assert not [record for record in caplog.records if record.name.startswith("services")]
        response = await client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "abc"})
        assert (await response.json())["id"] == "cmpl-abc"
        await client.post("/v1/completions", json={"prompt": ""}, headers={"X-Request-Id": "long"})
    records = [record for record in caplog.records if record.name.startswith("services")]
    assert [(record.request_id, re.sub(r"\d\.\d+ s", "0.0 s", record.message)) for record in records] == [
        ("cmpl-abc", "arrived: 1 tokens of prompt, max_tokens=16, n=1"),
        ("cmpl-abc", "ended: stop, after 1 tokens of prompt and 4 of output, in 0.0 s"),
        ("cmpl-abc", "POST /v1/completions: 200 in 0.0 s"),
        ("cmpl-long", "POST /v1/completions: 400 in 0.0 s"),
    ]


async def test_a_failure_names_its_request(caplog: pytest.LogCaptureFixture) -> None:
    """Streams too, and whether the requests are logged or not. What a client does wrong is not logged."""
    backend = FakeBackend()
    backend.failure, backend.fail_at = EngineFailure("the engine was lost"), 1
    async with serve(backend) as client:
        for stream in (False, True):
            body = {"prompt": "x", "stream": stream}
            await (await client.post("/v1/completions", json=body, headers={"X-Request-Id": "abc"})).read()
        backend.failure = ZeroDivisionError()
        await client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "bug"})
        await client.post("/v1/completions", json={"prompt": 5}, headers={"X-Request-Id": "wrong"})
    assert [(record.request_id, record.message) for record in caplog.records] == [
        ("cmpl-abc", "a request failed: the engine was lost"),
        ("cmpl-abc", "a request failed: the engine was lost"),
        ("cmpl-bug", "a request failed because of a bug"),
    ]


async def test_the_engine_gets_the_id_of_the_answer() -> None:
    """Each prompt of several has its own."""
    backend = FakeBackend()
    async with serve(backend) as client:
        headers = {"X-Request-Id": "abc"}
        for body in ({"prompt": "x"}, {"prompt": ["x", "y"]}):
            await client.post("/v1/completions", json=body, headers=headers)
        await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, headers=headers
        )
    assert [request.request_id for request in backend.requests] == [
        "cmpl-abc",
        "cmpl-abc-0",
        "cmpl-abc-1",
        "chatcmpl-abc",
    ]


async def test_requests_of_one_id_are_separate() -> None:
    """GTW-04: at once, behind one another, and if a client leaves one of them."""
    backend = FakeBackend(lambda prompt, _: prompt)  # an answer repeats its prompt
    headers = {"X-Request-Id": "abc"}

    async def ask(client: Client, prompt: str) -> str:
        fields = {"prompt": prompt, "max_tokens": 60}
        async with client.post("/v1/completions", json=fields, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "abc"
            return str((await response.json())["choices"][0]["text"])

    async with serve(backend) as client:
        prompts = [" two" * count for count in range(1, 51)]
        assert await asyncio.gather(*(ask(client, prompt) for prompt in prompts)) == prompts
        assert await ask(client, " six") == " six"
        backend.pause_at = 1
        leaving = await client.post("/v1/completions", json={"prompt": " one two", "stream": True}, headers=headers)
        await leaving.content.readany()
        staying = asyncio.create_task(ask(client, " five six"))
        await until(lambda: len(backend.requests) == 53)
        leaving.close()
        await backend.requests[51].left.wait()
        assert not backend.requests[52].left.is_set()
        backend.go_on.set()
        assert await staying == " five six"


async def test_requests_are_not_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serve() as client:
        await client.complete(prompt="x")
    assert not [record for record in caplog.records if record.name.startswith("services")]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_long_bodies_up_to_the_limit(path: str, chunked: bool) -> None:
    """GTW-09."""

    async def parts(data: bytes) -> Any:
        for at in range(0, len(data), 65536):
            yield data[at : at + 65536]

    async with serve(FakeBackend(max_model_len=2_000_000), max_body_size=2) as client:
        for size, status in ((900_000, 200), (1_900_000, 200), (2_200_000, 413), (8_000_000, 413)):
            text = "x" * size
            fields = {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
            data = json.dumps(fields).encode()
            body = parts(data) if chunked else io.BytesIO(data)
            async with client.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
                assert response.status == status
                if status == 413:
                    assert (await error_of(response))["type"] == "RequestTooLargeError"
        await client.complete(prompt="x")


async def test_a_small_compressed_body_that_is_long_inside_is_too_long() -> None:
    """GTW-09."""
    async with serve(max_body_size=1) as client:
        data = gzip.compress(json.dumps({"prompt": "x" * 5_000_000}).encode())
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with client.post("/v1/completions", data=data, headers=headers) as response:
            assert response.status == 413
            await error_of(response)


@pytest.mark.filterwarnings("ignore")
async def test_a_body_that_is_not_compressed_as_it_says() -> None:
    """GTW-10."""
    async with serve() as client:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with client.post("/v1/completions", data=b'{"prompt": "x"}', headers=headers) as response:
            assert response.status == 400
            assert "Content-Encoding" in (await error_of(response))["message"]
        await client.complete(prompt="x")


WRONG: list[Any] = [None, "x", "", 7, -7, 1.5, [], [1], ["x"], [[1]], {}, {"a": 1}, True, False, 10**30]


MESSAGES = [{"role": "user", "content": "x"}]
REQUESTS: list[tuple[str, type[Any], dict[str, Any]]] = [
    (PATHS[0], CompletionRequest, {"prompt": "x", "max_tokens": 2}),
    (PATHS[1], ChatRequest, {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", ResponsesRequest, {"input": "x", "max_output_tokens": 2}),
    ("/tokenize", TokenizeCompletionRequest, {"prompt": "x"}),
    ("/tokenize", TokenizeChatRequest, {"messages": MESSAGES}),
    ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
]


@pytest.mark.parametrize(("path", "kind", "good"), REQUESTS, ids=[kind.__name__ for _, kind, _ in REQUESTS])
async def test_any_type_in_any_field_is_no_failure(path: str, kind: type[Any], good: dict[str, Any]) -> None:
    """GTW-10."""
    refused = 0
    async with serve(BeamBackend()) as client:
        for field in kind.__struct_fields__:
            for value in WRONG:
                async with client.post(path, json=good | {field: value}) as response:
                    assert response.status in (200, 400, 404), (field, value)
                    if response.status != 200 and value is not None:
                        error = await error_of(response)
                        assert field in f"{error['message']} {error['param']}", (field, value, error)
                        refused += 1
        assert refused > 10 * len(kind.__struct_fields__) // 2
        await client.complete(prompt="x")


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [b"[]", b"1", b'""', b"", b"{", b"null", b"\xff", b"[" * 5000 + b"]" * 5000, b'{"temperature": NaN}',
     b'{"n": 1e400}',
     b'{"messages": [{"role": "user", "content": ' + b"[" * 5000 + b"]" * 5000 + b"}]}", b'{"n": ' + b"9" * 6000 + b"}",
     b'{"chat_template_kwargs": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", b'{"prompt": "\\ud800"}',
     b'{"messages": [{"role": "user", "content": "\\udc00 x"}]}', b'{"prompt": "x"} trailing',
     b'{"input": "\\ud800"}', b'{"input": [{"role": "user", "content": ' + b"[" * 5000 + b"]" * 5000 + b"}]}",
     b'{"tokens": [1.5]}']
)  # fmt: skip
async def test_bodies_that_are_no_request(path: str, body: bytes) -> None:
    """GTW-10."""
    async with serve() as client:
        status, error = await client.refused(path, body)
        assert status == 400
        assert error["type"] == "BadRequestError"
        await client.complete(prompt="x")


async def test_of_duplicate_keys_the_last_counts() -> None:
    """GTW-10."""
    async with serve() as client:
        data = b'{"prompt": "x", "n": 2, "n": 1}'
        async with client.post("/v1/completions", data=data, headers={"Content-Type": "application/json"}) as response:
            assert len((await response.json())["choices"]) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_missing_field_is_named(path: str) -> None:
    async with serve() as client:
        status, error = await client.refused(path, {})
        assert (status, error["param"]) == (400, "prompt" if path == PATHS[0] else "messages")


@pytest.mark.parametrize(
    "declared", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_a_body_that_is_declared_to_be_something_else(declared: str) -> None:
    async with (
        serve() as client,
        client.post("/v1/completions", data=b'{"prompt": "x"}', headers={"Content-Type": declared}) as response,
    ):
        assert response.status == 400
        await error_of(response)


@pytest.mark.parametrize("declared", ["application/json; charset=utf-8", "application/problem+json"])
async def test_a_body_that_is_declared_to_be_json(declared: str) -> None:
    async with (
        serve() as client,
        client.post("/v1/completions", data=b'{"prompt": "x"}', headers={"Content-Type": declared}) as response,
    ):
        assert response.status == 200


async def test_unknown_paths_and_wrong_methods_have_the_shape_too() -> None:
    async with serve() as client:
        async with client.get("/v1/nowhere") as response:
            assert (response.status, (await error_of(response))["type"]) == (404, "NotFoundError")
        async with client.get("/v1/completions") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            await error_of(response)
        async with client.delete("/v1/models") as response:
            assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", f"/v1/models/{MODEL}"), ("HEAD", "/v1/models"), ("GET", "/health"),
     ("GET", "/version?x=1/"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/metrics")]
)  # fmt: skip
async def test_a_slash_at_the_end_leads_to_the_path_without(method: str, path: str) -> None:
    """HTTP-09: a redirect keeps the method and the body, as in vLLM."""
    fields = {"prompt": "x"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "x"}]}
    body = fields if method == "POST" else None
    target = path.replace("?", "/?") if "?" in path else path + "/"
    async with serve() as client:
        async with client.request(method, target, json=body, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (307, path)
            assert await response.read() == b""
        async with client.request(method, target, json=body) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    "path", ["/v1/models//", "//v1/models", "//health/", "/v1//models/", "/nowhere/", "//nowhere.example/"]
)
async def test_other_slashes_too_many_are_not_found(path: str) -> None:
    """HTTP-09: no redirect leads to another server."""
    async with serve() as client:
        url = URL(f"http://{client.host}:{client.port}{path}", encoded=True)
        async with client.session.get(url, allow_redirects=False) as response:
            location = response.headers.get("Location")
            assert (response.status, location) == ((307, "/health") if path == "//health/" else (404, None))


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_model_is_not_found(path: str) -> None:
    async with serve(served_model_name=["a", "b"]) as client:
        fields = {"prompt": "x"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "x"}]}
        status, error = await client.refused(path, fields | {"model": "c"})
        assert (status, error["param"], error["type"]) == (404, "model", "NotFoundError")
        assert "does not exist" in error["message"]
        assert "a, b" in error["message"]
        for model in ("a", "b", None):
            async with client.post(path, json=fields | {"model": model}) as response:
                assert (await response.json())["model"] == "a"


async def test_models_are_listed_by_their_names() -> None:
    async with serve(served_model_name=["org/a", "b"]) as client:
        listed = (await (await client.get("/v1/models")).json())["data"]
        assert [card["id"] for card in listed] == ["org/a", "b"]
        one = await (await client.get("/v1/models/org/a")).json()
        assert one == listed[0]
        assert (one["root"], one["max_model_len"], one["object"], one["owned_by"]) == (MODEL, 256, "model", "quire")
        async with client.get("/v1/models/c") as response:
            assert response.status == 404
            await error_of(response)


async def test_health_is_whether_an_engine_can_go_on() -> None:
    backend = FakeBackend()
    async with serve(backend) as client:
        for path in ("/health", "/ping"):
            backend.is_ready = True
            async with client.get(path) as response:
                assert (response.status, await response.read()) == (200, b"")
            backend.is_ready = False
            async with client.get(path) as response:
                assert response.status == 503
                error = await error_of(response)
            assert error["type"] == "ServiceUnavailableError"
            assert error["message"] == "no engine has a worker that can make progress"


async def test_health_may_ask_for_several_engines() -> None:
    async with serve(FakeBackend()) as client:  # which has one
        for query, status in (("1", 200), ("0", 200), ("2", 503), ("two", 400), ("-1", 400), ("9" * 5000, 400)):
            async with client.get(f"/health?engines={query}") as response:
                assert response.status == status, query
        async with client.get("/health?engines=2") as response:
            assert (await error_of(response))["message"] == "fewer than 2 engines have a worker that can make progress"


async def test_health_without_engines_is_whether_requests_are_taken() -> None:
    """They wait here while no engine is ready."""
    backend = FakeBackend()
    backend.is_ready = False
    async with serve(backend) as client:

        async def health() -> tuple[int, str]:
            async with client.get("/health?engines=0") as response:
                return response.status, await response.text()

        assert await health() == (200, "")
        backend.unusable = "other files"
        assert (await health())[0] == 503
        assert "other files" in (await health())[1]
        backend.unusable = ""
        backend.welcome = None  # without an engine's limits, requests are refused
        assert (await health())[0] == 503
        backend.welcome = FakeBackend().welcome
        client.gateway.lifecycle.drain()
        assert (await health())[0] == 503


async def test_health_says_why_there_is_none() -> None:
    backend = FakeBackend()
    backend.welcome = None
    async with serve(backend) as client:
        async with client.get("/health") as response:
            assert "is starting" in (await error_of(response))["message"]
        client.gateway.lifecycle.drain()
        async with client.get("/health") as response:
            assert "is draining" in (await error_of(response))["message"]


async def test_while_no_engine_answers_requests_are_refused_for_now() -> None:
    backend = FakeBackend()
    backend.welcome = None
    async with serve(backend) as client:
        async with client.post("/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        assert (await (await client.get("/v1/models")).json())["data"][0]["max_model_len"] is None


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true"])
async def test_the_prefix_cache_is_reset_if_that_is_enabled(path: str) -> None:
    backend = FakeBackend()
    async with serve(backend) as client, client.post(path) as response:
        assert response.status == 404
    assert backend.num_resets == 0
    async with serve(backend, enable_reset_prefix_cache=True) as client:
        async with client.post(path) as response:
            assert (response.status, await response.json()) == (200, {"success": True})
        assert backend.num_resets == 1
        backend.is_ready = False
        async with client.post(path) as response:
            assert response.status == 503
            assert "is not connected" in (await error_of(response))["message"]
        async with client.get(path) as response:
            assert response.status == 405
    assert backend.num_resets == 1


async def test_version_is_a_string() -> None:
    async with serve() as client:
        assert isinstance((await (await client.get("/version")).json())["version"], str)


async def test_a_bug_is_a_500_with_its_id_and_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeBackend):
        def submit(self, *args: Any, **options: Any) -> Any:
            raise ZeroDivisionError("secret detail")

    async with serve(Broken()) as client:
        status, error = await client.refused("/v1/completions", {"prompt": "x"})
        assert (status, error["type"]) == (500, "InternalServerError")
        assert "secret" not in error["message"]
    assert any(record.exc_info and "ZeroDivisionError" in str(record.exc_info) for record in caplog.records)


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_does_not_come_is_given_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.body.BODY_TIMEOUT", 0.1)

    async def begun() -> Any:
        yield b'{"prompt": '
        await asyncio.Event().wait()

    async with serve() as client:
        async with client.post(path, data=begun(), headers={"Content-Type": "application/json"}) as response:
            assert response.status == 408
            assert (await error_of(response))["message"].startswith("the request did not come in time")
            assert response.headers["Connection"] == "close"
        monkeypatch.undo()
        await client.complete(prompt="x")


async def test_the_api_is_also_under_the_path_of_a_proxy() -> None:
    """API-02: with --root-path, a proxy may strip the path or leave it."""
    async with serve(root_path="/llm/one/", api_key=["k"]) as client:
        key = {"Authorization": "Bearer k"}
        for root in ("", "/llm/one"):
            async with client.get(f"{root}/v1/models") as response:
                assert response.status == 401
            async with client.get(f"{root}/health") as response:
                assert response.status == 200
            async with client.post(f"{root}/v1/completions", json={"prompt": "hi"}, headers=key) as response:
                assert (await response.json())["choices"][0]["text"] == "one two three"
        async with client.get("/llm/v1/models", headers=key) as response:
            assert response.status == 404
        async with client.get("/metrics") as response:
            assert 'handler="/v1/completions"} 2.0' in await response.text()
    async with serve(root_path="/v1") as client:
        for root in ("", "/v1"):
            async with client.get(f"{root}/v1/models") as response:
                assert response.status == 200
        async with client.get("/metrics") as response:
            assert 'handler="/v1/models"} 2.0' in await response.text()


async def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    async with serve() as client:
        headers = {"Content-Type": "application/json"}
        async with client.post("/v1/completions", data=b'\xef\xbb\xbf{"prompt": "hi"}', headers=headers) as response:
            assert response.status == 200

"""Tests of CORS: preflights, and the headers that let web pages of other origins read responses."""

from collections.abc import Mapping

import pytest

from shared.errors import EngineFailure
from tests.gateway.fakes import Client, FakeBackend, error_of, serve

ORIGIN = "https://chat.example"
HERE = {"Origin": ORIGIN}
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/models"]


async def preflight(
    client: Client, path: str = PATHS[0], *, origin: str = ORIGIN, method: str = "POST", headers: str = ""
) -> tuple[int, Mapping[str, str]]:
    asked = {"Origin": origin, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}
    async with client.options(path, headers={name: value for name, value in asked.items() if value}) as response:
        if response.status >= 400:
            await error_of(response)
        return response.status, response.headers


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("origins", [["*"], [ORIGIN], ["https://other.example", ORIGIN]])
async def test_a_preflight_needs_no_key(path: str, origins: list[str]) -> None:
    """HTTP-08, GTW-03."""
    async with serve(allowed_origins=origins, api_key=["secret"]) as client:
        status, headers = await preflight(client, path, headers="authorization, content-type, x-stainless-os")
        assert status == 200
        assert headers["Access-Control-Allow-Origin"] == ("*" if origins == ["*"] else ORIGIN)
        assert "POST" in headers["Access-Control-Allow-Methods"].split(", ")
        allowed = set(headers["Access-Control-Allow-Headers"].split(", "))
        assert allowed == {"authorization", "content-type", "x-stainless-os"}
        assert int(headers["Access-Control-Max-Age"]) > 0
        assert headers.get("Vary") == (None if origins == ["*"] else "Origin")
        async with client.post(path, json={"prompt": "x"}, headers=HERE) as response:
            assert response.status == 401, "the request itself needs one"


@pytest.mark.parametrize(
    ("origin", "method", "headers"),
    [
        ("https://evil.example", "POST", ""),
        ("null", "POST", ""),
        (ORIGIN + ".evil.example", "POST", ""),
        (ORIGIN.upper(), "POST", ""),
        (ORIGIN, "DELETE", ""),
        (ORIGIN, "POST", "authorization, x-other"),
    ],
)
async def test_what_is_not_allowed_is_refused(origin: str, method: str, headers: str) -> None:
    """HTTP-08, GTW-03."""
    settings = {"allowed_methods": ["GET", "POST"], "allowed_headers": ["Authorization"]}
    async with serve(allowed_origins=[ORIGIN], **settings) as client:
        status, answer = await preflight(client, origin=origin, method=method, headers=headers)
        assert status == 400
        assert ("Access-Control-Allow-Origin" in answer) == (origin == ORIGIN)
        status, answer = await preflight(client, headers="authorization, content-type")
        assert (status, answer["Access-Control-Allow-Methods"]) == (200, "GET, POST")


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_say_which_pages_may_read_them(stream: bool) -> None:
    """HTTP-08, GTW-03: on whole and streamed responses and on errors."""
    async with serve(allowed_origins=[ORIGIN], api_key=["secret"]) as client:
        key = {"Authorization": "Bearer secret"}
        asked = [({"prompt": "x", "stream": stream}, key, 200), ({"prompt": 1}, key, 400), ({"prompt": "x"}, {}, 401)]
        for path, fields, extra, status in [
            *((PATHS[1], *one) for one in asked), ("/nowhere", {}, key, 404), ("/v1/models", {}, key, 405)
        ]:  # fmt: skip
            async with client.post(path, json=fields, headers=HERE | extra) as response:
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
                assert response.headers["Vary"] == "Origin"
            async with client.post(path, json=fields, headers=extra | {"Origin": "https://evil.example"}) as response:
                assert "Access-Control-Allow-Origin" not in response.headers
                assert response.headers["Vary"] == "Origin"


async def test_a_failure_of_the_engine_can_be_read_too() -> None:
    """HTTP-08."""
    backend = FakeBackend()
    backend.fail_at, backend.failure = 0, EngineFailure("gone")
    async with (
        serve(backend, allowed_origins=["*"]) as client,
        client.post(PATHS[1], json={"prompt": "x"}, headers=HERE) as response,
    ):
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (500, "*")


@pytest.mark.parametrize("origins", [["*"], [ORIGIN]])
async def test_credentials_need_the_origin_by_name(origins: list[str]) -> None:
    """HTTP-08."""
    async with serve(allowed_origins=origins, allow_credentials=True) as client:
        for status, headers in [
            await preflight(client),
            await preflight(client, method="PATCH" if origins == ["*"] else "GET"),
        ]:
            assert status == 200
            assert headers["Access-Control-Allow-Origin"] == ORIGIN
            assert headers["Access-Control-Allow-Credentials"] == "true"
            assert headers["Vary"] == "Origin"
            assert "*" not in headers["Access-Control-Allow-Methods"]


async def test_without_origins_nothing_is_allowed() -> None:
    """HTTP-08: as in vLLM, it is off until origins are named."""
    async with serve() as client:
        status, headers = await preflight(client)
        assert (status, headers.get("Access-Control-Allow-Origin")) == (405, None)
        async with client.get("/v1/models", headers=HERE) as response:
            assert not {"Access-Control-Allow-Origin", "Vary"} & set(response.headers)


async def test_options_that_is_no_preflight_needs_a_key() -> None:
    async with serve(allowed_origins=["*"], api_key=["secret"]) as client:
        for headers in ({}, HERE, {"Access-Control-Request-Method": "POST"}):
            assert (await client.options("/v1/models", headers=headers)).status == 401

"""Tests of `Expect: 100-continue`: the gateway asks for a body only if it is going to read it."""

import pytest

from tests.gateway.raw_http import BODY, ask, connect, get, listening, post

WAITS = "Expect: 100-continue"


def head(*headers: str, length: int = len(BODY), path: str = "/v1/completions") -> bytes:
    """Return a request that holds its body back."""
    return post(WAITS, *headers, path=path, body=b"").replace(b"Length: 0", b"Length: %d" % length)


@pytest.mark.parametrize("value", ["100-continue", "100-Continue"])
async def test_a_body_that_is_taken_is_asked_for(value: str) -> None:
    async with listening() as port, connect(port, head().replace(b"100-continue", value.encode())) as exchange:
        assert (await exchange.answer()).status == 100
        exchange.send(BODY)
        assert (await exchange.answer()).status == 200
        exchange.send(get())  # the connection is kept
        assert (await exchange.answer()).status == 200


KEY = "Authorization: Bearer secret"
TEXT = head(KEY).replace(b"application/json", b"text/plain")
REFUSED = {
    "too long": (head(KEY, length=2**20 + 1), 413),
    "far too long": (head(KEY, length=10**12), 413),
    "no key": (head(), 401),
    "a type that is not taken": (TEXT, 400),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_body_that_is_not_taken_is_not_asked_for(kind: str) -> None:
    """HTTP-09."""
    data, status = REFUSED[kind]
    async with listening(api_key=["secret"], max_body_size=1) as port, connect(port, data) as exchange:
        answer = await exchange.answer()
        assert (answer.status, answer.error["code"]) == (status, status)
        assert answer.headers["connection"] == "close"  # the gateway cannot know whether the body will come


async def test_a_body_of_the_greatest_length_is_asked_for() -> None:
    async with listening(max_body_size=1) as port, connect(port, head(length=2**20)) as exchange:
        assert (await exchange.answer()).status == 100


async def test_a_body_that_has_come_already_is_not_asked_for() -> None:
    async with listening() as port:
        assert (await ask(port, post(WAITS))).status == 200
        assert (await ask(port, post(WAITS, version="1.0"))).status == 200


@pytest.mark.parametrize("value", ["miracles", "100-continue, miracles", "200-ok"])
async def test_an_expectation_that_cannot_be_met_gets_the_apis_error(value: str) -> None:
    """HTTP-09."""
    async with listening() as port:
        answer = await ask(port, post(f"Expect: {value}"))
        assert (answer.status, answer.error["code"]) == (417, 417)
        assert "x-request-id" in answer.headers


async def test_http_1_0_has_no_expectations() -> None:
    async with listening() as port:
        assert (await ask(port, post("Expect: miracles", version="1.0"))).status == 200


async def test_a_body_that_is_too_long_is_refused_before_it_comes_without_a_word_too() -> None:
    """HTTP-09."""
    data = post(body=b"").replace(b"Length: 0", b"Length: 1048577")
    async with listening(max_body_size=1) as port, connect(port, data) as exchange:
        assert (await exchange.answer()).status == 413

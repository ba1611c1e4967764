"""Tests of the limits on request heads, and of the errors for those that are longer."""

import pytest

from tests.gateway.raw_http import ask, connect, get, listening, post

KIB = 1024


@pytest.mark.parametrize("name", ["Cookie", "Authorization", "X-Forwarded-Client-Cert"])
@pytest.mark.parametrize("size", [9 * KIB, 16 * KIB, 60 * KIB, 64 * KIB])
async def test_a_long_header_is_taken(name: str, size: int) -> None:
    """HTTP-01."""
    async with listening() as port:
        assert (await ask(port, get("/v1/models", f"{name}: {'a' * size}"))).status == 200
        assert (await ask(port, post(f"{name}: {'a' * size}"))).status == 200


@pytest.mark.parametrize("count", [8, 64, 100])
async def test_many_headers_of_64_kib_together_are_taken(count: int) -> None:
    """HTTP-01."""
    fields = [f"X-{at}: {'a' * (64 * KIB // count)}" for at in range(count)]
    async with listening() as port:
        assert (await ask(port, get("/health", *fields))).status == 200


TOO_LONG = {
    "one field": [f"Cookie: {'a' * 70 * KIB}"],
    "one name": [f"{'a' * 70 * KIB}: x"],
    "a few fields": [f"X-{at}: {'a' * 10 * KIB}" for at in range(7)],
    "many fields": [f"X-{at}: {'a' * KIB}" for at in range(80)],
    "too many fields": [f"X-{at}: a" for at in range(130)],
}


@pytest.mark.parametrize("fields", TOO_LONG.values(), ids=TOO_LONG)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
async def test_longer_headers_have_a_status_of_their_own(fields: list[str], path: str) -> None:
    """HTTP-01."""
    data = get(path, *fields) if path == "/v1/models" else post(*fields)
    async with listening(api_key=["secret"]) as port, connect(port, data) as exchange:
        answer = await exchange.answer()
        assert answer.status == 431
        assert answer.error["message"].startswith("the request cannot be read: its headers are more than")
        assert await exchange.ended()


async def test_a_head_that_does_not_end_is_not_kept() -> None:
    """HTTP-01: an endless head of short fields is refused."""
    async with listening() as port, connect(port, b"GET / HTTP/1.1\r\nHost: x\r\n") as exchange:
        for at in range(100):
            exchange.send(f"X-{at}: {'a' * KIB}\r\n".encode())
        assert (await exchange.answer()).status == 431


async def test_the_status_is_heard_by_a_client_that_goes_on_sending() -> None:
    """HTTP-01: the connection is not closed before the client can read the error."""
    async with listening() as port, connect(port, get("/health", f"Cookie: {'a' * 8_000_000}")) as exchange:
        assert (await exchange.answer()).status == 431


@pytest.mark.parametrize("size", [9 * KIB, 20_000, 100 * KIB])
@pytest.mark.parametrize("target", ["/", "/v1/models?x=", "/v1/models/"])
async def test_a_long_path_has_a_status_of_its_own(size: int, target: str) -> None:
    """HTTP-01."""
    async with listening() as port, connect(port, get(target + "a" * size)) as exchange:
        answer = await exchange.answer()
        assert answer.status == 414
        assert "first line" in answer.error["message"]
        assert await exchange.ended()


async def test_a_path_of_8_kib_is_none_too_long() -> None:
    """HTTP-01."""
    async with listening() as port:
        assert (await ask(port, get("/v1/models?x=" + "a" * 8000))).status == 200

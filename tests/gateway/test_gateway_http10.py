"""Tests of HTTP/1.0, where a stream ends with the connection, and of HEAD, whose response has no body."""

import pytest

from tests.gateway.raw_http import connect, get, listening, post

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

PROMPT = b'{"prompt":"hi","stream":true,"stream_options":{"include_usage":true}}'
CHAT = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
RESPONSE = b'{"input":"hi","stream":true}'
STREAMS = {"/v1/completions": PROMPT, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}


@pytest.mark.parametrize("headers", [("Connection: keep-alive",), ("Connection: close",), ()])
@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_ends_with_its_connection(path: str, headers: tuple[str, ...]) -> None:
    """HTTP-02."""
    data = post(*headers, body=STREAMS[path], path=path, version="1.0")
    async with listening() as port, connect(port, data) as exchange:
        answer = await exchange.answer()  # reads to the end of the connection
        assert (answer.version, answer.status) == ("HTTP/1.0", 200)
        assert answer.headers.get("connection", "close") == "close"
        assert "transfer-encoding" not in answer.headers
        last = answer.body.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
        assert last.startswith(b"event: response.completed\n" if path == "/v1/responses" else b"data: [DONE]")


async def test_a_stream_of_http_1_1_keeps_its_connection() -> None:
    async with listening() as port, connect(port, post(body=PROMPT)) as exchange:
        assert (await exchange.answer()).body.endswith(b"data: [DONE]\n\n")
        exchange.send(get())
        assert (await exchange.answer()).status == 200


async def test_whole_answers_keep_the_connection_if_that_is_wanted() -> None:
    """HTTP-02."""
    async with listening() as port, connect(port) as exchange:
        for data, status in (
            (post("Connection: keep-alive", version="1.0"), 200),
            (get("/nowhere", "Connection: keep-alive", version="1.0"), 404),
            (get("/health", "Connection: keep-alive", version="1.0"), 200),
        ):
            exchange.send(data)
            answer = await exchange.answer()
            assert (answer.status, answer.headers["connection"]) == (status, "keep-alive")
        exchange.send(post(version="1.0"))
        assert (await exchange.answer()).status == 200
        assert await exchange.ended()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/models", 200), ("/health", 200), ("/metrics", 200), ("/x", 404), ("/v1/completions", 405)],
)
async def test_the_answer_to_head_has_no_body(path: str, status: int, version: str) -> None:
    """HTTP-02."""
    async with listening() as port, connect(port) as exchange:
        for _ in range(2):
            exchange.send(get(path, "Connection: keep-alive", method="HEAD", version=version))
            answer = await exchange.answer(to_head=True)
            assert answer.status == status
        exchange.send(get("/version", "Connection: close", version=version))
        assert (await exchange.answer()).body.startswith(b'{"version"')

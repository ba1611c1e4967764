"""Tests of streams: their frames, and that they carry the same as whole responses."""

import asyncio
import itertools
import json
import random
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from shared.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable
from tests.gateway.fakes import (
    TOKENIZER,
    FakeBackend,
    FakeEngineRequest,
    endless,
    ends,
    error_of,
    events,
    ids,
    says,
    serve,
    texts,
)
from tests.gateway.raw_http import Exchange, listening, post
from tests.waiting import until

FAMILY = "一个 😀 👨‍👩‍👧‍👦 e\u0301 é"
PATHS = ["/v1/completions", "/v1/chat/completions"]
FOREIGN = {PATHS[0]: {"messages"}, PATHS[1]: {"prompt"}}  # fields of the other endpoint


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return prompt | fields


async def streamed(client: Any, path: str, **fields: Any) -> list[dict[str, Any]]:
    return await (client.stream_completion if path == "/v1/completions" else client.stream_chat)(**body(path, **fields))


@pytest.mark.parametrize("path", PATHS)
async def test_usage_comes_once_and_only_if_asked_for(path: str) -> None:
    """STR-01."""
    async with serve() as client:
        chunks = await streamed(client, path, max_tokens=8, stream_options={"include_usage": True})
        *middle, last = chunks
        assert not any(chunk.get("usage") for chunk in middle)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4  # with the end-of-sequence token
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 4
        assert not any("usage" in chunk for chunk in await streamed(client, path, max_tokens=8))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}, None])
async def test_no_usage_chunk_unless_it_is_true(path: str, options: Any) -> None:
    """STR-02."""
    async with serve() as client:
        chunks = await streamed(client, path, stream_options=options)
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("path", PATHS)
async def test_stream_options_need_a_stream(path: str) -> None:
    """STR-02."""
    async with serve() as client:
        status, error = await client.refused(path, body(path, stream_options={"include_usage": True}))
        assert (status, error["param"]) == (400, "stream_options")


@pytest.mark.parametrize("path", PATHS)
async def test_continuous_usage_grows_with_the_chunks(path: str) -> None:
    async with serve() as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await streamed(client, path, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        role = [0] if path == "/v1/chat/completions" else []
        assert counts == [*role, 1, 2, 3, 4, 4]  # the last two: the end-of-sequence token, and the whole


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
@pytest.mark.parametrize("path", PATHS)
async def test_usage_for_everybody_is_in_every_chunk(path: str, options: dict[str, Any]) -> None:
    """API-02: with --enable-force-include-usage, for proxies that count tokens; vLLM turns both options on."""
    async with serve(enable_force_include_usage=True) as client:
        chunks = await streamed(client, path, **options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[-4:] == [2, 3, 4, 4]
        assert chunks[-1]["choices"] == []


CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def sent(chunks: list[dict[str, Any]], prompts: int, n: int) -> list[tuple[int, int]]:
    """Return for each chunk its number of completion tokens, and the words in all texts so far; a token is a word."""
    words = [0] * (prompts * n)
    counts = []
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        words[choice["index"]] += 0 if text.startswith("hello") else len(text.split())
        words[choice["index"]] += choice["finish_reason"] == "stop"
        counts.append((chunk["usage"]["completion_tokens"], sum(words)))
    return counts


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("burst", [1, 2])
@pytest.mark.parametrize("path", PATHS)
async def test_continuous_usage_counts_what_was_sent_so_far(path: str, burst: int, n: int) -> None:
    """HTTP-04: a chunk does not count the tokens of chunks that are written after it."""
    backend = FakeBackend(says("one two three", " four", " five six"))
    backend.burst = burst
    async with serve(backend) as client:
        chunks = await streamed(client, path, n=n, stream_options=CONTINUOUS)
        pairs = sent(chunks, 1, n)
        assert [usage for usage, _ in pairs] == [words for _, words in pairs]
        assert pairs[0][0] == (0 if path == "/v1/chat/completions" else min(burst, 4))
        total = {1: 4, 3: 9}[n]
        assert chunks[-1]["usage"]["completion_tokens"] == pairs[-1][0] == total


@pytest.mark.parametrize("prompts", [1, 3])
async def test_continuous_usage_does_not_count_an_echo(prompts: int) -> None:
    """HTTP-04."""
    backend = FakeBackend(says(" two three", " four"))
    async with serve(backend) as client:
        fields = {"prompt": ["hello"] * prompts, "echo": True, "n": 2}
        chunks = await client.stream_completion(**fields, stream_options=CONTINUOUS)
        pairs = sent(chunks, prompts, 2)
        assert [usage for usage, _ in pairs] == [words for _, words in pairs]
        assert [usage for usage, _ in pairs[:2]] == [0, 0]
        assert chunks[-1]["usage"]["completion_tokens"] == pairs[-1][0] == 5 * prompts


async def test_continuous_usage_counts_tokens_with_their_text() -> None:
    """HTTP-04: tokens of half a character, and of a possible stop string, count when they are shown."""
    async with serve(FakeBackend(says("é two three"))) as client:
        chunks = await client.stream_completion(prompt="x", stop=" three five", stream_options=CONTINUOUS)
        shown = [(chunk["choices"][0]["text"], chunk["usage"]["completion_tokens"]) for chunk in chunks[:-1]]
        assert shown == [("é", 2), (" two", 3), (" three", 5)]


async def test_each_choice_of_a_chat_begins_with_its_role() -> None:
    """STR-04."""
    async with serve(FakeBackend(says("one two", "three four five"))) as client:
        chunks = await client.stream_chat(n=2)
        for index in (0, 1):
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert not any("role" in delta for delta in deltas[1:])
            assert all(isinstance(delta["content"], str) for delta in deltas), "the last chunk's too, as in vLLM"
        assert texts(chunks) == {0: "one two", 1: "three four five"}


@pytest.mark.parametrize("path", PATHS)
async def test_no_chunk_is_half_a_character(path: str) -> None:
    """STR-05."""
    async with serve(FakeBackend(says(FAMILY))) as client:
        chunks = await streamed(client, path, max_tokens=200)
        async with client.post(path, json=body(path, max_tokens=200)) as response:
            (choice,) = (await response.json())["choices"]
        assert texts(chunks) == {0: FAMILY}
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) == FAMILY
        assert TOKENIZER.decode(ids(FAMILY)) == FAMILY
        assert not any("\ufffd" in text for chunk in chunks for text in texts([chunk]).values())


async def test_the_prompt_does_not_leak_into_a_character_it_left_open() -> None:
    """STR-06."""
    tokens = ids("Price list: 😀!")
    async with serve(FakeBackend(says(tokens[-3:]))) as client:
        chunks = await client.stream_completion(prompt=tokens[:-3], max_tokens=8)
        whole = await client.complete(prompt=tokens[:-3], max_tokens=8)
        assert texts(chunks)[0] == whole["choices"][0]["text"] == "😀!"


async def test_random_bytes_are_answered_with_json() -> None:
    """STR-09: whole and streamed, with and without log-probabilities, whose bytes are those of the tokens."""
    rng = random.Random(9)
    written: list[int] = []

    def random_bytes(_: Sequence[int], __: int) -> list[int]:
        written[:] = [rng.randrange(4, 260) for _ in range(20)]
        return written

    async with serve(FakeBackend(random_bytes)) as client:
        for turn in range(200):
            fields: dict[str, Any] = {"max_tokens": 20} | ({"logprobs": True} if turn % 3 == 0 else {})
            if turn % 2:
                choices = [chunk["choices"][0] for chunk in await client.stream_chat(**fields)]
            else:
                choices = (await client.chat(**fields))["choices"]
            assert choices[-1]["finish_reason"] == "length"
            if "logprobs" in fields:
                entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
                assert [bytes(entry["bytes"]) for entry in entries] == [TOKENIZER.token_bytes(id) for id in written]
        assert (await client.get("/health")).status == 200


async def test_logprobs_hold_the_raw_bytes() -> None:
    """STR-09."""
    async with serve(FakeBackend(says("é"))) as client:
        content = (await client.chat(logprobs=True))["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], list(b"</s>")]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"prompt": [20] * 257, "messages": [{"role": "user", "content": "x" * 257}]}, 400),
        ({"max_tokens": 1000}, 400),
        ({"model": "no"}, 404),
        ({"temperature": -1}, 400),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}}, 400),
    ],
)
async def test_refusals_of_a_stream_have_their_status(path: str, wrong: dict[str, Any], status: int) -> None:
    """STR-10: the answer is JSON, and the same as without a stream."""
    wrong = {name: value for name, value in wrong.items() if name not in FOREIGN[path]}
    async with serve() as client:
        plain = await client.refused(path, body(path, **wrong))
        assert plain == await client.refused(path, body(path, stream=True, **wrong))
        assert plain[0] == status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("refusal", "status"),
    [(Overloaded("full", 2.3), 429), (Unavailable("draining"), 503), (InvalidRequest("too long", "prompt"), 400)],
)
async def test_an_engines_refusal_is_a_status_too(path: str, stream: bool, refusal: Exception, status: int) -> None:
    """STR-10."""
    backend = FakeBackend()
    backend.refusal = refusal
    async with serve(backend) as client, client.post(path, json=body(path, stream=stream)) as response:
        assert response.status == status
        await error_of(response)
        assert response.headers.get("Retry-After") == {429: "3", 503: "1"}.get(status)
    assert all(request.left.is_set() for request in backend.requests)


async def test_choices_end_one_by_one() -> None:
    """STR-13."""
    outputs = [ids("one two"), ids("one two three" * 3), ids("four five six" * 5)]
    async with serve(FakeBackend(says(*outputs))) as client:
        chunks = await client.stream_completion(prompt="hi", n=3, max_tokens=100)
        whole = await client.complete(prompt="hi", n=3, max_tokens=100)
        assert ends(chunks) == {0: ["stop"], 1: ["stop"], 2: ["stop"]}
        assert texts(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}
        assert texts(chunks)[2].endswith("six")


@pytest.mark.parametrize("prompts", [["one", "two", "three"], [ids("one"), ids("two x"), ids("three")]])
async def test_choices_are_numbered_by_prompt_then_sample(prompts: Any) -> None:
    """STR-15."""
    async with serve(FakeBackend(says(" four", " five"))) as client:
        fields = {"prompt": prompts, "n": 2, "echo": True}
        whole = await client.complete(**fields)
        chunks = await client.stream_completion(**fields, stream_options={"include_usage": True})
        shown = prompts if isinstance(prompts[0], str) else ["one", "two x", "three"]
        expected = {
            2 * at + sample: text + end
            for at, text in enumerate(shown)
            for sample, end in enumerate((" four", " five"))
        }
        assert {choice["index"]: choice["text"] for choice in whole["choices"]} == expected
        assert texts(chunks) == expected
        assert whole["usage"] == chunks[-1]["usage"]
        assert whole["usage"]["prompt_tokens"] == sum(len(ids(text)) for text in shown)
        assert whole["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("prompt", ["hello six", ids("hello six")])
@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_an_echo_comes_once_and_first(prompt: Any, max_tokens: int) -> None:
    """STR-18."""
    async with serve(FakeBackend(says(" one two three four five"))) as client:
        fields = {"prompt": prompt, "echo": True, "max_tokens": max_tokens}
        chunks = await client.stream_completion(**fields)
        whole = (await client.complete(**fields))["choices"][0]
        expected = "hello six" + (" one two three" if max_tokens else "")
        assert texts(chunks) == {0: expected}
        assert whole["text"] == expected
        assert chunks[0]["choices"][0]["text"] == "hello six"
        assert ends(chunks) == {0: ["length"]}


async def test_pieces_that_wait_together_are_sent_together() -> None:
    backend = FakeBackend(says("one two three four five six"))
    backend.burst = 3
    async with serve(backend) as client:
        chunks = await client.stream_completion(prompt="hi", max_tokens=6)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["one two three", " four five six"]


async def test_a_failure_after_the_first_token_is_an_event() -> None:
    backend = FakeBackend()
    backend.fail_at, backend.failure = 2, EngineFailure("the engine is gone")
    async with serve(backend) as client:
        chunks = await client.stream_completion(prompt="hi")
        assert [texts([chunk])[0] for chunk in chunks[:-1]] == ["one", " two"]
        error = chunks[-1]["error"]
        assert (error["code"], error["message"], error["type"]) == (500, "the engine is gone", "InternalServerError")
        assert (await client.refused("/v1/completions", {"prompt": "hi"}))[0] == 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (Overloaded("full", 2.3), 429),
        (Unavailable("draining"), 503),
        (InvalidRequest("too long", "prompt"), 400),
        (EngineFailure("the engine was lost"), 500),
    ],
)
async def test_a_late_answer_is_a_status_too(path: str, stream: bool, refusal: Exception, status: int) -> None:
    """HTTP-05: nothing is sent before the engine accepts or refuses the request, however late that is."""
    backend = FakeBackend()
    backend.refusal = refusal
    backend.answers.clear()
    async with serve(backend) as client:
        asking = asyncio.ensure_future(client.post(path, json=body(path, stream=stream)))
        await backend.submitted.wait()
        assert not (await asyncio.wait([asking], timeout=0.6))[0]
        backend.answers.set()
        async with await asking as response:
            assert response.status == status
            await error_of(response)
            assert response.headers.get("Retry-After") == {429: "3", 503: "1"}.get(status)
    assert all(request.left.is_set() for request in backend.requests)


async def test_a_late_refusal_of_one_prompt_of_several_is_the_status_and_ends_the_others() -> None:
    """HTTP-05: a completion has one status, so no prompt's stream begins before all are accepted."""

    class Second(FakeBackend):
        def submit(self, *args: Any, **options: Any) -> Any:
            self.refusal = Overloaded("full", 4) if self.requests else None
            return super().submit(*args, **options)

    refused = Second()
    refused.answers.clear()
    async with serve(refused) as client:
        fields = {"prompt": ["a", "b"], "stream": True}
        asking = asyncio.ensure_future(client.post("/v1/completions", json=fields))
        await refused.submitted.wait()
        assert not (await asyncio.wait([asking], timeout=0.4))[0]
        refused.answers.set()
        async with await asking as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "4")
    assert [request.left.is_set() for request in refused.requests] == [True, True]


def patient_pieces(pieces: list[bytes]) -> list[str]:
    """Return the events that a reader sees who strips each piece of a stream before searching it for blank lines.

    vLLM's benchmark reads so. An event is at its end with a blank line, or if it is whole JSON by then.
    """
    read_events: list[str] = []
    rest = ""
    for piece in pieces:
        *events, rest = (rest + piece.decode().strip()).split("\n\n")
        read_events += events
        if rest.startswith("data: {"):
            read_events.append(rest)
            rest = ""
    return [event for event in read_events if not event.startswith(":")]


@pytest.mark.parametrize("path", PATHS)
async def test_an_accepted_stream_is_kept_alive_and_loses_nothing_by_it(path: str) -> None:
    """HTTP-05: comments come only after the acceptance and in silence, and no reader takes an event for one."""
    backend = FakeBackend()
    backend.pause_at = 0
    backend.answers.clear()
    async with serve(backend, sse_keep_alive_interval=0.05) as client:
        asking = asyncio.ensure_future(client.post(path, json=body(path, stream=True)))
        assert not (await asyncio.wait([asking], timeout=0.3))[0], "no byte before the acceptance"
        backend.answers.set()
        pieces: list[bytes] = []
        async with await asking as response:
            while len(pieces) < 3:
                pieces.append(await response.content.readany())
            assert b"".join(pieces).replace(b": keep-alive\n\n", b"") == b""
            backend.go_on.set()
            while piece := await response.content.readany():
                pieces.append(piece)
        whole = b"".join(pieces).decode()
        assert texts(events(whole)) == {0: "one two three"}
        assert ('"one"' if path == PATHS[0] else '"assistant"') in patient_pieces(pieces)[0]


async def test_comments_can_be_left_out() -> None:
    """API-02: --sse-keep-alive-interval 0."""
    backend = FakeBackend()
    backend.pause_at = 0
    fields = {"prompt": "hi", "stream": True}
    async with (
        serve(backend, sse_keep_alive_interval=0.0) as client,
        client.post("/v1/completions", json=fields) as response,
    ):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.readany(), 0.3)
        backend.go_on.set()
        assert texts(events(await response.text())) == {0: "one two three"}


async def test_a_stream_that_is_not_silent_has_no_comments() -> None:
    """HTTP-05: the chunks of any prompt count as a sign of life."""
    fields = {"prompt": "hi", "stream": True}
    async with (
        serve(sse_keep_alive_interval=60.0) as client,
        client.post("/v1/completions", json=fields) as response,
    ):
        assert ":" not in [line[:1] for line in (await response.text()).splitlines()]


async def test_headers_do_not_wait_for_the_first_token() -> None:
    backend = FakeBackend()
    backend.pause_at = 0
    fields = {"prompt": "hi", "stream": True}
    async with serve(backend) as client, client.post("/v1/completions", json=fields) as response:
        assert response.status == 200  # although nothing was generated yet
        backend.go_on.set()
        assert (await response.content.readuntil(b"\n\n")).startswith(b"data: {"), "no comment before the chunks"
        assert "three" in await response.text()


async def test_a_chat_names_its_role_with_the_first_token_and_not_before() -> None:
    backend = FakeBackend()
    backend.pause_at = 0
    fields = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with serve(backend) as client, client.post("/v1/chat/completions", json=fields) as response:
        assert response.status == 200
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.readany(), 0.05)
        backend.go_on.set()
        role, text, *_ = (await response.content.readany()).split(b"\n\n")
    assert (b'"role":"assistant"' in role, b'"content":"one"' in text) == (True, True), "they come together"


async def test_one_refused_prompt_of_several_refuses_the_request() -> None:
    backend = FakeBackend()
    refusals = iter([None, Overloaded("full", 1)])

    class Second(FakeBackend):
        def submit(self, *args: Any, **options: Any) -> Any:
            self.refusal = next(refusals)
            return super().submit(*args, **options)

    backend = Second()
    backend.pause_at = 0
    async with serve(backend) as client:
        status, _ = await client.refused("/v1/completions", {"prompt": ["a", "b"], "stream": True})
        assert status == 429
        assert [request.left.is_set() for request in backend.requests] == [True, True]


async def test_headers_of_a_stream() -> None:
    """GTW-07."""
    async with serve() as client:
        headers = {"Accept-Encoding": "gzip, deflate"}
        async with client.post("/v1/completions", json={"prompt": "x", "stream": True}, headers=headers) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            assert response.headers["Cache-Control"] == "no-cache"
            assert response.headers["X-Accel-Buffering"] == "no"
            assert "Content-Encoding" not in response.headers


async def test_each_event_is_sent_at_once() -> None:
    """GTW-07."""
    backend = FakeBackend()
    backend.pause_at = 1
    fields = {"prompt": "hi", "stream": True}
    async with serve(backend) as client, client.post("/v1/completions", json=fields) as response:
        assert b'"one"' in await response.content.readuntil(b"\n\n")  # the second token is not there yet
        backend.go_on.set()
        assert "three" in await response.text()


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_ends_its_request(path: str) -> None:
    backend = FakeBackend()
    backend.pause_at = 1
    async with serve(backend) as client:
        response = await client.post(path, json=body(path, stream=True))
        await response.content.readany()
        response.close()
        await backend.requests[0].left.wait()


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_before_the_first_token_ends_its_request(path: str) -> None:
    backend = FakeBackend()
    backend.pause_at = 0
    async with serve(backend) as client:
        asking = asyncio.ensure_future(client.post(path, json=body(path)))
        await backend.submitted.wait()
        asking.cancel()
        await backend.requests[0].left.wait()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_does_not_read_is_waited_for(version: str) -> None:
    """What it would get is not collected here. Once it reads, it gets all of it."""
    backend, num_tokens = FakeBackend(endless, max_model_len=100_000), 48_000
    backend.burst = 64
    fields = {"prompt": "hi", "max_tokens": num_tokens, "logprobs": 5, "stream": True}  # 15 MB
    async with listening(backend) as port:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(post(body=json.dumps(fields).encode(), version=version))
        await until(lambda: bool(backend.requests))
        (request,) = backend.requests
        await until(lambda: stands_still(request))
        assert request.steps < num_tokens
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**16)
        answer = await Exchange(reader, writer).answer()
        writer.transport.abort()
    assert texts(events(answer.body.decode()))[0] == TOKENIZER.decode([*itertools.islice(endless([], 0), num_tokens)])


async def stands_still(request: FakeEngineRequest) -> bool:
    """Return whether nothing more of a request is read."""
    before = request.steps
    await asyncio.sleep(0.2)
    return 0 < before == request.steps

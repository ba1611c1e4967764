"""Tests that no client blocks the loop for the others, whatever it sends and however long its answer is.

The bound is wide, since tests run on busy machines: what a body costs on a quiet one is for `benchmarks/stalls.py`.
Time for which others have the CPU is not counted.
"""

import json
import resource
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.gateway.bounds import MAX_TOKENS, MIB
from tests.gateway.fakes import Client, FakeBackend, endless, ids, serve
from tests.gateway.large_bodies import CHAT, COMPLETION, bodies, stall
from tests.gateway.raw_http import ask, get, listening

BOUND = 0.25  # seconds
ROUNDS = 4


async def longest(client: Client, path: str, sent: Sequence[bytes], statuses: set[int]) -> float:
    """Return the shortest stall, in seconds, of some rounds with these bodies. Stop at one within the bound."""
    stalls: list[float] = []
    assert client.port is not None
    for _ in range(ROUNDS):
        stalled, answered, _ = await stall(client.port, path, sent)
        assert set(answered) <= statuses
        stalls.append(stalled)
        if stalled < BOUND:
            break
    return min(stalls)


async def test_bodies_of_all_shapes_at_the_size_limit() -> None:
    """LOOP-01: no body keeps the loop, be it refused or served."""
    async with serve() as client:
        stalls_by_name = {
            name: await longest(client, path, [body], {200, 400, 404})
            for name, path, body in bodies(client.gateway.max_body_size)
        }
        await client.complete(prompt="hi")
    assert len(stalls_by_name) > 100
    assert max(stalls_by_name.values()) < BOUND, sorted(stalls_by_name.items(), key=lambda one: -one[1])[:5]


REPORTED = {
    "stop_token_ids": b'{"prompt":"hi","stop_token_ids":[' + b"1," * 15_000_000 + b"1]}",
    "prompt": b'{"prompt":[' + b"[1]," * 7_500_000 + b"[1]]}",
    "fields": b'{"prompt":"hi"' + b"".join(b',"%07d":1' % at for at in range(2_200_000)) + b"}",
    "chat_template_kwargs": b'{"prompt":"hi","chat_template_kwargs":{"a":[' + b"[]," * 9_000_000 + b"[]]}}",
}


@pytest.mark.parametrize("size", [None, 32])
@pytest.mark.parametrize("name", REPORTED)
async def test_three_bodies_of_thirty_megabytes_at_once(name: str, size: int | None) -> None:
    """LOOP-01: they are too long by default; with a larger --max-body-size they have too many values."""
    async with serve(max_body_size=size) as client:
        path = CHAT if name == "chat_template_kwargs" else COMPLETION
        stalled = await longest(client, path, [REPORTED[name]] * 3, {413} if size is None else {400})
    assert stalled < (BOUND if size is None else 2 * BOUND)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_long_inside_is_unpacked_in_pieces(encoding: str) -> None:
    """LOOP-01, DOS-01: one that unpacks to a gigabyte is refused once it is too long, and takes no memory.

    The service's own runner is tested, since the library's unpacks all of it for nobody.
    """
    packed = packed_spaces(encoding)
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with listening() as port:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
        stalled, statuses, _ = await stall(port, COMPLETION, [packed] * 3, headers)
        assert statuses == [413] * 3
        assert stalled < 2 * BOUND
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
        assert (await ask(port, get("/health"))).status == 200


def packed_spaces(encoding: str) -> bytes:
    """Return a gigabyte of spaces, about one megabyte when it is packed."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    piece = b" " * MIB
    return b"".join([*(packer.compress(piece) for _ in range(1024)), packer.flush()])


def anyof(levels: int) -> dict[str, Any]:
    """Return a schema in which each of the levels has eight alternatives of the next, so that all are 8**levels."""
    definitions = {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 8} for at in range(levels)}
    return {"$ref": "#/$defs/0", "$defs": definitions | {str(levels): {"type": "null"}}}


BOMBS: dict[str, Any] = {
    "repeats": {"regex": "(a{1,200}){1,200}"},
    "ambiguous": {"regex": "(x+x+)+y"},
    "long": {"regex": ".{0,5000}z"},
    "alternatives": {"json": anyof(12)},
    "no end of a set": {"grammar": "root ::= " + "[" * 8000},
    "recursion": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 8}}}},
}


@pytest.mark.parametrize("name", BOMBS)
async def test_five_bombs_of_grammars_at_once(name: str) -> None:
    """DOS-02: they are compiled off the loop, and refused if that takes too long."""
    body = json.dumps({"prompt": "hi", "max_tokens": 1, "structured_outputs": BOMBS[name]}).encode()
    async with serve() as client:
        assert await longest(client, COMPLETION, [body] * 5, {200, 400}) < BOUND
        await client.complete(prompt="hi")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}),
        (COMPLETION, {"prompt": "hi", "logprobs": 20}),
    ],
)
async def test_a_long_answer_with_many_log_probabilities(path: str, fields: dict[str, Any]) -> None:
    """LOOP-01: a long response is not encoded in one call."""
    async with serve(FakeBackend(endless, max_model_len=4096)) as client:
        body = json.dumps(fields | {"n": 8, "max_tokens": 2000}).encode()
        assert await longest(client, path, [body], {200}) < BOUND


async def test_prompts_log_probabilities_in_an_answer_and_in_a_stream() -> None:
    """LOOP-01: the log-probabilities of a long prompt come at once, before the output."""
    async with serve(FakeBackend(max_model_len=10_000)) as client:
        fields = {"prompt": [20] * 9000, "max_tokens": 1, "echo": True, "logprobs": 20}
        for more in ({}, {"stream": True}):
            body = json.dumps(fields | more).encode()
            assert await longest(client, COMPLETION, [body], {200}) < BOUND


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETION, {"prompt": [20] * 1_000_000, "return_token_ids": True}),
        (COMPLETION, {"prompt": [20] * 1_000_000, "return_token_ids": True, "stream": True}),
        (COMPLETION, {"prompt": [20] * 1_000_000, "truncate_prompt_tokens": 900_000, "echo": True}),
        (COMPLETION, {"prompt": "one two " * 250_000, "truncate_prompt_tokens": 10}),
        (COMPLETION, {"prompt": "one two " * 250_000, "truncate_prompt_tokens": 400_000, "truncation_side": "right"}),
        (CHAT, {"messages": [{"role": "user", "content": "one two " * 250_000}], "return_prompt_text": True}),
        (CHAT, {"messages": [{"role": "assistant", "content": "one two " * 250_000}], "echo": True, "stream": True}),
    ],
    ids=range(7),
)
async def test_what_an_answer_repeats_of_a_long_prompt_and_what_it_drops(path: str, fields: dict[str, Any]) -> None:
    """LOOP-01."""
    async with serve(FakeBackend(max_model_len=2**20)) as client:
        body = json.dumps(fields | {"max_tokens": 1}).encode()
        assert await longest(client, path, [body], {200}) < BOUND


async def test_repetitions_are_looked_for_in_many_outputs() -> None:
    """LOOP-01: a hundred outputs, each of which has all sizes of patterns in mind."""
    detection = {"max_pattern_size": 256, "min_pattern_size": 256, "min_count": 1000}
    body = json.dumps({"prompt": "hi", "n": 128, "max_tokens": 200, "repetition_detection": detection}).encode()
    async with serve(FakeBackend(endless)) as client:
        assert await longest(client, COMPLETION, [body], {200}) < BOUND


async def test_names_of_megabytes_are_cut_in_errors() -> None:
    """LOOP-03: an error is a few lines long, whatever it quotes."""
    name = b"n" * 3 * MIB
    message = b'"messages":[{"role":"user","content":"x"}]'
    bad = [
        (COMPLETION, b'{"prompt":"x","model":"' + name + b'"}', 404),
        (COMPLETION, b'{"prompt":"x","' + name + b'":1,"temperature":9}', 400),
        (COMPLETION, b'{"prompt":"x","logit_bias":{"' + name + b'":1}}', 400),
        (COMPLETION, b'{"prompt":"x","response_format":{"type":"' + name + b'"}}', 400),
        (COMPLETION, b'{"prompt":"x","stop":"' + name + b'"}', 400),
        (COMPLETION, b'{"prompt":["x",' + b"1" * MIB + b"]}", 400),
        (COMPLETION, b'{"prompt":"x","max_tokens":' + b"1" * MIB + b"}", 400),
        (CHAT, b'{"messages":[{"role":"user","content":[{"type":"' + name + b'"}]}]}', 400),
        (CHAT, b'{"chat_template_kwargs":{"why":"' + name + b'"},' + message + b"}", 400),
        (CHAT, b'{"chat_template_kwargs":{"' + name + b'":1,"messages":1},' + message + b"}", 400),
    ]
    for strict in (False, True):
        async with serve(strict_fields=strict, template="{{ raise_exception(why) }}") as client:
            assert client.port is not None
            for path, body, status in bad:
                _, statuses, length = await stall(client.port, path, [body])
                assert (statuses, length < 1000) == ([status], True), body[:40]
            await client.complete(prompt="hi")


@pytest.mark.parametrize("n", [10**6, 10**9])
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_a_number_of_choices_beyond_the_limit_costs_nothing(path: str, n: int) -> None:
    """LIM-10: neither time nor memory."""
    fields = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "n": n}
    del fields["messages" if path == COMPLETION else "prompt"]
    async with serve() as client:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
        assert await longest(client, path, [json.dumps(fields).encode()] * 5, {400}) < BOUND
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


async def test_a_stream_of_a_thousand_prompts_that_says_its_usage_in_every_chunk() -> None:
    """LOOP-02: the usage keeps its sums from chunk to chunk."""
    body = json.dumps(
        {
            "prompt": ["hi"] * 1024,
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ).encode()
    async with serve() as client:
        assert await longest(client, COMPLETION, [body], {200}) < BOUND


async def test_tokenizing_long_prompts() -> None:
    """LOOP-01: neither a long text nor many tokens keep the loop."""
    backend = FakeBackend(max_model_len=100_000)
    many = MAX_TOKENS - 10
    asked = [
        ("/tokenize", {"prompt": "é" * (many // 2), "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": " two" * 500_000}]}),
        ("/detokenize", {"tokens": ids("é") * (many // 2)}),
    ]
    async with serve(backend) as client:
        for path, body in asked:
            assert await longest(client, path, [msgspec.json.encode(body)] * 2, {200}) < BOUND, path

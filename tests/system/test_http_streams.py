"""Streams of a whole server, byte by byte and through the official client: what comes when, and how each ends."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.gateway.fakes import ends, events, texts
from tests.scripted import CHAIN
from tests.system.asking import MODEL, chained, client, says, settled, streaming, talk
from tests.system.running import Server
from tests.system.running import server as serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUDGET = 64  # tokens a step


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving(talk(delay=0.005), "--max-num-seqs=32", f"--max-num-batched-tokens={BUDGET}") as made:
        yield made


async def test_str_12_a_prompt_in_many_chunks_is_silent_until_its_first_token(server: Server) -> None:
    before, prompt = await settled(server), [CHAIN, *[9] * 999]
    async with streaming(server, prompt, 10, stream_options={"include_usage": True}) as stream:
        first = await stream.event()
        while first.startswith(":"):
            first = await stream.event()
        chunks = events(first + "\n\n" + await stream.rest())
    assert texts(chunks) == {0: chained(prompt, 10)}
    assert ends(chunks) == {0: ["length"]}
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 10)
    assert len(chunks) <= 12
    grown = await settled(server, before, 1)
    assert grown["quire:steps_total"] >= 1000 / BUDGET + 9


async def test_str_12_with_the_official_client(server: Server) -> None:
    def work() -> list[openai.types.chat.ChatCompletionChunk]:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", timeout=60) as official:
            messages = [{"role": "user", "content": "x" * 1000}]
            stream = official.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=10, stream=True, stream_options={"include_usage": True}
            )
            return list(stream)

    *chunks, usage = await asyncio.to_thread(work)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert usage.usage is not None
    assert usage.usage.prompt_tokens > 1000
    assert usage.usage.completion_tokens == 10


async def test_str_16_a_hundred_streams_have_one_finish_each(server: Server) -> None:
    before = await settled(server)
    kinds = [
        {"content": "port"},
        {"content": "port"},
        {"content": "view", "max_tokens": 5},
        {"content": "view", "stop": "o t"},
    ]

    async def one(official: openai.AsyncOpenAI, kind: dict) -> tuple[str, str]:
        fields = dict(kind)
        stream = await official.chat.completions.create(
            model=MODEL,
            messages=says(fields.pop("content")),
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
        chunks = [chunk async for chunk in stream]
        *rest, last, usage = chunks
        assert [chunk.choices[0].finish_reason for chunk in rest] == [None] * len(rest)
        assert usage.choices == []
        return last.choices[0].finish_reason, "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])

    async with client(server) as official:
        found = Counter(await asyncio.gather(*(one(official, kinds[at % 4]) for at in range(100))))
    assert found == {("stop", "one two three"): 50, ("length", " two" * 5): 25, ("stop", " tw"): 25}
    grown = await settled(server, before, 100)
    assert grown["vllm:request_success_total:stop"] == 75
    assert grown["vllm:request_success_total:length"] == 25


async def test_str_16_tools_are_refused_for_now(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    async with client(server) as official:
        with pytest.raises(openai.BadRequestError, match="tools are not supported") as caught:
            await official.chat.completions.create(model=MODEL, messages=says("hello"), tools=[tool], stream=True)
    assert caught.value.param == "tools"

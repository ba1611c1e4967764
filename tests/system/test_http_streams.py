"""Tests streams of a whole server, byte by byte and through OpenAI's client: what comes when, and how each ends."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionChunk

from tests.gateway.fakes import ends, events, texts
from tests.scripted_worker import CHAIN
from tests.system.http_client import MODEL, SAMPLES, chained, client, ended, says, settled, streaming, talk
from tests.system.processes import Server
from tests.system.processes import server as serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUDGET = 64  # tokens a step
OPTIONS: Any = {"include_usage": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving(talk(delay=0.005), "--max-num-seqs=32", f"--max-num-batched-tokens={BUDGET}") as system:
        yield system


async def test_a_prompt_in_many_chunks_is_silent_until_its_first_token(server: Server) -> None:
    """STR-12."""
    before, prompt = await settled(server), [CHAIN, *[9] * 999]
    async with streaming(server, prompt, 10, stream_options=OPTIONS) as stream:
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


async def test_with_the_official_client(server: Server) -> None:
    """STR-12."""

    def work() -> list[ChatCompletionChunk]:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", timeout=60) as official:
            create = official.chat.completions.create
            messages = says("x" * 1000)
            return list(create(model=MODEL, messages=messages, max_tokens=10, stream=True, stream_options=OPTIONS))

    *chunks, usage = await asyncio.to_thread(work)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert usage.usage is not None
    assert usage.usage.prompt_tokens > 1000
    assert usage.usage.completion_tokens == 10


async def test_a_hundred_streams_have_one_finish_each(server: Server) -> None:
    """STR-16."""
    before = await settled(server)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("port", {}),
        ("port", {}),
        ("view", {"max_tokens": 5}),
        ("view", {"stop": "o t"}),
    ]
    async with client(server) as official:
        result = await asyncio.gather(*(chat(official, *kinds[at % 4]) for at in range(100)))
    assert Counter(result) == {("stop", "one two three"): 50, ("length", " two" * 5): 25, ("stop", " tw"): 25}
    assert ended(await settled(server, before, 100), SAMPLES) == {"stop": 75, "length": 25}


async def chat(official: openai.AsyncOpenAI, content: str, fields: dict[str, Any]) -> tuple[str | None, str]:
    """Return how a stream ended, and its text. The reason comes in one chunk, the last before the usage."""
    create = official.chat.completions.create
    stream = await create(model=MODEL, messages=says(content), stream=True, stream_options=OPTIONS, **fields)
    *chunks, usage = [chunk async for chunk in stream]
    assert usage.choices == []
    *none, last = [chunk.choices[0].finish_reason for chunk in chunks]
    assert none == [None] * len(none)
    return last, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def test_tools_that_the_template_does_not_show_are_refused(server: Server) -> None:
    """STR-16."""
    tool: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    async with client(server) as official:
        with pytest.raises(openai.BadRequestError, match="does not show tools") as caught:
            await official.chat.completions.create(model=MODEL, messages=says("hello"), tools=[tool], stream=True)
    assert caught.value.param == "tools"

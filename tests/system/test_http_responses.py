"""Tests /v1/responses of a whole server through OpenAI's client: streams, and that they outlive their worker."""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response

from tests.system.http_client import MODEL, SAMPLES, TOKENIZER, client, ended, settled, talk
from tests.system.processes import Server
from tests.system.processes import server as serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 200
FIELDS: Any = {"model": MODEL, "input": "x", "max_output_tokens": TOKENS}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving(talk(), "--max-num-seqs=8", "--worker-timeout=1") as system:
        yield system


async def streamed(official: openai.AsyncOpenAI, begun: asyncio.Event | None = None) -> Response:
    """Return the response that the client makes of a stream, which has `begun` with its first text."""
    async with official.responses.stream(**FIELDS) as events:
        async for event in events:
            if event.type == "response.output_text.delta":
                assert event.snapshot.endswith(event.delta)
                if begun is not None:
                    begun.set()
            if event.type == "response.incomplete":
                return event.response
    raise AssertionError("the stream has no end")


async def test_a_stream_is_the_whole_answer(server: Server) -> None:
    async with client(server) as official:
        whole = await official.responses.create(**FIELDS)
        stream = await streamed(official)
    assert whole.status == stream.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text == stream.output_text
    assert len(TOKENIZER.encode(whole.output_text)) > 10
    assert stream.usage is not None
    assert whole.usage is not None
    assert stream.usage.output_tokens == whole.usage.output_tokens == TOKENS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_outlive_their_worker(server: Server, number: signal.Signals) -> None:
    """PRC-02."""
    async with client(server) as official:
        before, expected = await settled(server), await official.responses.create(**FIELDS)
        begun = [asyncio.Event() for _ in range(6)]
        with server.engine.slowed():
            streams = [asyncio.create_task(streamed(official, one)) for one in begun]
            whole = asyncio.create_task(official.responses.create(**FIELDS))
            await asyncio.gather(*(one.wait() for one in begun))
            assert not any(stream.done() for stream in streams)
            server.engine.worker.signal(number)
        for answer in [*await asyncio.gather(*streams), await whole]:
            assert answer.output_text == expected.output_text
    grown = await settled(server, before, 8)
    assert grown["quire:worker_losses_total"] == 1
    assert ended(grown, SAMPLES) == {"length": 8}

"""Tests of the gateway with OpenAI's client."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from shared.errors import Overloaded
from tests.gateway.fakes import MODEL, FakeBackend, says, serve


async def ask(backend: FakeBackend, work: Callable[[openai.OpenAI], Any], **settings: Any) -> Any:
    """Call `work` with the client in a thread, and return its result."""
    async with serve(backend, **settings) as server:
        url = f"http://{server.host}:{server.port}/v1"

        def run() -> Any:
            with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
                return work(client)

        return await asyncio.to_thread(run)


CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def test_a_chat() -> None:
    answer = await ask(FakeBackend(), lambda client: client.chat.completions.create(**CHAT), api_key=["secret"])
    assert answer.choices[0].message.content == "one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_chat_of_two() -> None:
    """STR-04."""

    def work(client: openai.OpenAI) -> Any:
        return list(client.chat.completions.create(**CHAT, n=2, stream=True, stream_options={"include_usage": True}))

    *chunks, last = await ask(FakeBackend(says("one two", "three four")), work)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "one two", 1: "three four"}
    assert last.choices == []
    assert last.usage.completion_tokens > 4


async def test_log_probabilities_have_the_clients_types() -> None:
    """LGP-11."""

    def work(client: openai.OpenAI) -> Any:
        return client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)

    answer = await ask(FakeBackend(), work)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["one", " two", " three", "</s>"]
    assert bytes(content[0].bytes) == b"one"
    assert len(content[0].top_logprobs) == 2


async def test_completions_and_extra_fields() -> None:
    backend = FakeBackend()

    def work(client: openai.OpenAI) -> Any:
        return client.completions.create(model=MODEL, prompt="x", logprobs=1, extra_body={"top_k": 3})

    answer = await ask(backend, work)
    assert answer.choices[0].text == "one two three"
    assert answer.choices[0].logprobs.text_offset[:2] == [0, 3]
    assert backend.requests[0].sampling.top_k == 3


async def test_errors_have_the_clients_types() -> None:
    def wrong(client: openai.OpenAI) -> Any:
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**CHAT | {"model": "other"})
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**CHAT, temperature=3)
        return caught.value

    error = await ask(FakeBackend(), wrong)
    assert (error.param, error.type, error.status_code) == ("temperature", "BadRequestError", 400)


async def test_a_wrong_key_and_a_full_queue_have_the_clients_types() -> None:
    backend = FakeBackend()
    backend.refusal = Overloaded("full", 1)

    def wrong(client: openai.OpenAI) -> None:
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="x").models.list()
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**CHAT)

    await ask(backend, wrong, api_key=["secret"])


async def test_models() -> None:
    def work(client: openai.OpenAI) -> Any:
        return [model.id for model in client.models.list()], client.models.retrieve(MODEL).id

    assert await ask(FakeBackend(), work) == ([MODEL], MODEL)

"""Tests of the gateway with OpenAI's client."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import openai
import pytest

from shared.errors import Overloaded
from tests.gateway.fakes import MODEL, TOKENIZER, FakeBackend, ids, says, serve
from tests.text.tool_outputs import WRITERS, Call
from tests.text.tool_templates import TEMPLATES


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
    texts, roles = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index].append(choice.delta.role)
    assert texts == {0: "one two", 1: "three four"}
    assert all(first == "assistant" and set(others) == {None} for first, *others in roles.values())
    assert last.choices == []
    assert last.usage.completion_tokens > 4


async def test_log_probabilities_have_the_clients_types() -> None:
    """LGP-11."""

    def work(client: openai.OpenAI) -> Any:
        create, fields = client.chat.completions.create, {**CHAT, "logprobs": True, "top_logprobs": 2}
        return create(**fields), list(create(**fields, stream=True))

    answer, chunks = await ask(FakeBackend(), work)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["one", " two", " three", "</s>"]
    assert bytes(content[0].bytes) == b"one"
    assert len(content[0].top_logprobs) == 2
    choices = [chunk.choices[0] for chunk in chunks]
    streamed = [entry.model_dump() for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert streamed == [entry.model_dump() for entry in content]


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


async def test_a_prompt_that_is_too_long_is_known_by_its_words() -> None:
    """LangChain, LiteLLM and pydantic-ai look for these, to shorten a conversation and go on."""

    def wrong(client: openai.OpenAI) -> list[str]:
        messages = []
        for prompt in (" two" * 300, "x" * 100_000, [5] * 300, [5] * 256):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model=MODEL, prompt=prompt, stream=True)
            messages.append(caught.value.message)
        for message in ([{"role": "user", "content": " two" * 300}], [{"role": "user", "content": ""}] * 300):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=MODEL, messages=message, stream=True)
            messages.append(caught.value.message)
        return messages

    for message in await ask(FakeBackend(max_model_len=256), wrong):
        assert "prompt is too long" in message
        assert "this model's maximum context length is 256 tokens" in message


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


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = Call("get_weather", {"city": 'São "Paulo"'})


def conversational(family: str, thinks: bool) -> FakeBackend:
    """Return a backend that calls a tool, and answers with what the prompt has of its result."""

    def script(prompt: Sequence[int], _: int) -> Iterable[int]:
        text = TOKENIZER.decode(prompt)
        said = "It rains." if "42 mm" in text else "Let me see.\n" + WRITERS[family]([CALL])
        return ids(f"<think>\nHm.\n</think>\n\n{said}" if thinks else said)

    return FakeBackend(script, max_model_len=2048)


def tool_loop(client: openai.OpenAI, stream: bool) -> list[Any]:
    """Do what programs do with tools: call them until the model answers. Return the messages of the assistant."""
    messages: list[Any] = [{"role": "user", "content": "Does it rain?"}]
    answers = []
    while True:
        fields: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [WEATHER]}
        if stream:
            with client.chat.completions.stream(**fields) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**fields).choices[0]
        answers.append(choice)
        if choice.finish_reason != "tool_calls":
            return answers
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls or ():
            assert json.loads(call.function.arguments) == CALL.arguments
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "42 mm"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "mistral", "kimi_k2"])
async def test_a_loop_of_tool_calls(family: str, thinks: bool, stream: bool) -> None:
    """The client's own accumulator puts the deltas of a stream together."""
    parsers = {"reasoning_parser": "qwen3"} if thinks else {}
    backend = conversational(family, thinks)
    answers = await ask(backend, lambda client: tool_loop(client, stream), template=TEMPLATES[family], **parsers)
    first, second = (choice.message for choice in answers)
    assert [call.function.name for call in first.tool_calls] == ["get_weather"]
    assert first.content == "Let me see."
    assert (second.content, second.tool_calls) == ("It rains.", None)
    assert answers[1].finish_reason == "stop"
    if thinks:
        assert (first.reasoning, second.reasoning_content) == ("Hm.", "Hm.")

"""LiteLLM, by its routes for OpenAI's API and for vLLM's."""

import json
from typing import Any

import litellm
import pytest

from tests.clients.conftest import Server
from tests.clients.conversation import (
    ANSWER,
    KEY,
    QUESTION,
    RESULT,
    THOUGHT,
    TOO_LONG,
    TRIP,
    TRIP_QUESTION,
    Trip,
)
from tests.clients.snippets import run_snippet

ROUTES = pytest.mark.parametrize("route", ["openai", "hosted_vllm"])
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TRIP_TOOL = {"type": "function", "function": {"name": "plan", "parameters": Trip.model_json_schema(), "strict": True}}


def ask(server: Server, route: str, messages: Any, *, stream: bool = False, **fields: Any) -> Any:
    """Return the answer; that of a stream is put together by LiteLLM."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    fields = {"model": f"{route}/{server.model}", "api_base": server.url, "api_key": KEY, "num_retries": 0} | fields
    answer = litellm.completion(messages=messages, stream=stream, **fields)
    return litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tool_calls(scripted: Server, route: str, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    (choice,) = ask(scripted, route, messages, stream=stream, tools=[TOOL]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content.strip() == THOUGHT
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    answer = ask(scripted, route, messages, stream=stream, tools=[TOOL])
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.completion_tokens > 0


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_a_typed_answer(embedded: Server, route: str, stream: bool) -> None:
    answer = ask(embedded, route, TRIP_QUESTION, stream=stream, response_format=Trip)
    assert Trip.model_validate_json(answer.choices[0].message.content)


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call(embedded: Server, route: str, stream: bool) -> None:
    fields: Any = {"tools": [TRIP_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = ask(embedded, route, TRIP_QUESTION, stream=stream, **fields).choices[0].message.tool_calls
    assert Trip.model_validate_json(call.function.arguments)


@ROUTES
def test_errors(embedded: Server, route: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        ask(embedded, route, QUESTION, model=f"{route}/gpt-5")
    for stream in (False, True):
        with pytest.raises(litellm.ContextWindowExceededError):
            ask(embedded, route, TOO_LONG, stream=stream)
    with pytest.raises(litellm.AuthenticationError):
        ask(embedded, route, QUESTION, api_key="wrong")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(embedded, route, QUESTION, temperature=5)


def test_the_documentation(scripted: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_snippet("LiteLLM", scripted)
    assert capsys.readouterr().out == f"{TRIP!r}\n"

"""OpenAI's own client. These tests run with two generations of it."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.clients.conftest import Server
from tests.clients.conversation import (
    ANSWER,
    FATAL,
    KEY,
    QUESTION,
    RESULT,
    THOUGHT,
    TOO_LONG,
    TRIP,
    TRIP_QUESTION,
    TWO_QUESTIONS,
    Trip,
)
from tests.clients.snippets import run_snippet

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def connect(server: Server, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, **{"api_key": KEY, "max_retries": 0} | settings)


@pytest.fixture
def script(scripted: Server) -> Iterator[openai.OpenAI]:
    with connect(scripted) as client:
        yield client


@pytest.fixture
def model(embedded: Server) -> Iterator[openai.OpenAI]:
    with connect(embedded) as client:
        yield client


def ask(client: openai.OpenAI, stream: bool, **fields: Any) -> ChatCompletion:
    """Return the next answer; that of a stream is put together by the client."""
    if not stream:
        return client.chat.completions.create(model="tiny", **fields)
    with client.chat.completions.stream(model="tiny", **fields) as events:
        return events.get_final_completion()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("question", "cities"), [(QUESTION, ["Paris"]), (TWO_QUESTIONS, ["Paris", "Oslo"])])
def test_a_loop_of_tool_calls(script: openai.OpenAI, question: str, cities: list[str], stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    (choice,) = ask(script, stream, messages=messages, tools=[TOOL]).choices
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments)["city"] for call in calls] == cities
    messages.append(choice.message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls]
    (choice,) = ask(script, stream, messages=messages, tools=[TOOL]).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWER)


def test_reasoning(script: openai.OpenAI) -> None:
    answer = ask(script, False, messages=[{"role": "user", "content": QUESTION}], tools=[TOOL])
    assert getattr(answer.choices[0].message, "reasoning_content", "").strip() == THOUGHT
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_a_typed_answer(model: openai.OpenAI) -> None:
    answer = model.chat.completions.parse(
        model="smol",
        messages=[{"role": "user", "content": TRIP_QUESTION}],
        response_format=Trip,
        temperature=1,
        seed=1,
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)
    assert answer.choices[0].message.refusal is None


def test_a_streamed_typed_answer(model: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": TRIP_QUESTION}]
    with model.chat.completions.stream(
        model="smol", messages=messages, response_format=Trip, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    pieces = [event.delta for event in events if event.type == "content.delta" and event.delta]
    (done,) = [event for event in events if event.type == "content.done"]
    assert "".join(pieces) == done.content
    assert len(pieces) > 3
    assert isinstance(done.parsed, Trip)
    assert final.choices[0].message.parsed == done.parsed
    assert final.usage is not None
    assert final.usage.completion_tokens >= len(pieces)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Trip"}}])
def test_a_typed_call(model: openai.OpenAI, choice: Any, stream: bool) -> None:
    """A function made of a class is strict, and the client parses its arguments."""
    fields: Any = {
        "model": "smol",
        "messages": [{"role": "user", "content": TRIP_QUESTION}],
        "tools": [openai.pydantic_function_tool(Trip)],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    if stream:
        with model.chat.completions.stream(**fields) as events:
            done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
            answer = events.get_final_completion()
        assert [type(event.parsed_arguments) for event in done] == [Trip]
    else:
        answer = model.chat.completions.parse(**fields)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Trip)


async def test_the_asynchronous_client(scripted: Server) -> None:
    async with openai.AsyncOpenAI(base_url=scripted.url, api_key=KEY) as client:
        messages: list[Any] = [{"role": "user", "content": TRIP_QUESTION}]
        async with client.chat.completions.stream(model="tiny", messages=messages, response_format=Trip) as stream:
            final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == TRIP


RESPONSES_TOOL: Any = {"type": "function", "strict": False, **TOOL["function"]}


def respond(client: openai.OpenAI, stream: bool, **fields: Any) -> Any:
    """Return the next response; that of a stream is put together by the client."""
    if not stream:
        return client.responses.create(**fields)
    with client.responses.stream(**fields) as events:
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("question", "cities"), [(QUESTION, ["Paris"]), (TWO_QUESTIONS, ["Paris", "Oslo"])])
def test_a_loop_of_tool_calls_in_responses(
    script: openai.OpenAI, question: str, cities: list[str], stream: bool
) -> None:
    """What the client got, reasoning among it, it sends back as it is."""
    items: list[Any] = [{"role": "user", "content": question}]
    answer = respond(script, stream, model="tiny", input=items, tools=[RESPONSES_TOOL])
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == cities
    items += answer.output
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]
    answer = respond(script, stream, model="tiny", input=items, tools=[RESPONSES_TOOL])
    assert (answer.status, answer.output_text) == ("completed", ANSWER)


def test_reasoning_in_responses(script: openai.OpenAI) -> None:
    answer = script.responses.create(model="tiny", input=QUESTION, tools=[RESPONSES_TOOL])
    thought = answer.output[0]
    assert thought.type == "reasoning"
    assert [part.text.strip() for part in thought.content or ()] == [THOUGHT]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_a_text_in_responses(model: openai.OpenAI) -> None:
    fields: Any = {"model": "smol", "input": QUESTION, "max_output_tokens": 8, "temperature": 0}
    whole = model.responses.create(**fields)
    with model.responses.stream(**fields) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.status == "incomplete"
    assert whole.output_text == "".join(deltas) != ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_typed_answer_in_responses(model: openai.OpenAI, stream: bool) -> None:
    fields: Any = {"model": "smol", "input": TRIP_QUESTION, "text_format": Trip, "temperature": 1}
    answer = respond(model, True, **fields) if stream else model.responses.parse(**fields)
    assert isinstance(answer.output_parsed, Trip)


@pytest.mark.parametrize("stream", [False, True])
def test_a_typed_call_in_responses(model: openai.OpenAI, stream: bool) -> None:
    tools: Any = [openai.pydantic_function_tool(Trip)]
    tools = [{"type": "function", **tool["function"]} for tool in tools]
    answer = respond(model, stream, model="smol", input=TRIP_QUESTION, tools=tools, tool_choice="required")
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [type(Trip.model_validate_json(call.arguments)) for call in calls] == [Trip] * len(calls) != []


def test_a_failure_in_a_stream_of_responses(script: openai.OpenAI) -> None:
    events = list(script.responses.create(model="tiny", input=FATAL, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert "the worker died" in events[-1].response.error.message


def test_errors(embedded: Server, model: openai.OpenAI) -> None:
    def fields(model: str = "smol", text: str = QUESTION, **more: Any) -> Any:
        return {"model": model, "messages": [{"role": "user", "content": text}]} | more

    with pytest.raises(openai.NotFoundError):
        model.chat.completions.create(**fields(model="gpt-5"))
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"maximum context length is \d+ tokens, but messages has \d+"):
            model.chat.completions.create(**fields(text=TOO_LONG, stream=stream))
    with pytest.raises(openai.BadRequestError) as caught:
        model.chat.completions.create(**fields(temperature=5))
    assert caught.value.param == "temperature"
    with connect(embedded, api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        model.responses.create(model="smol", input=QUESTION, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is \d+ tokens, but input has \d+"):
        model.responses.create(model="smol", input=TOO_LONG)


def test_an_error_in_a_stream(script: openai.OpenAI) -> None:
    """What goes wrong after the status is sent is an event, which the client raises."""
    stream = script.chat.completions.create(model="tiny", messages=[{"role": "user", "content": FATAL}], stream=True)
    with pytest.raises(openai.APIError, match="the worker died") as caught:
        list(stream)
    assert (caught.value.type, str(caught.value.code)) == ("InternalServerError", "500")


def test_an_answer_that_is_cut_off(model: openai.OpenAI) -> None:
    """The client refuses to parse what `max_tokens` has cut off."""
    with pytest.raises(openai.LengthFinishReasonError):
        model.chat.completions.parse(
            model="smol", messages=[{"role": "user", "content": TRIP_QUESTION}], response_format=Trip, max_tokens=3
        )


def test_the_documentation(scripted: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_snippet("OpenAI", scripted)
    assert capsys.readouterr().out == f"{TRIP!r}\n"

"""LangChain, by langchain-openai, and its agents."""

from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.clients.conftest import Server
from tests.clients.conversation import (
    ANSWER,
    FATAL,
    KEY,
    QUESTION,
    TOO_LONG,
    TRIP,
    TRIP_QUESTION,
    TWO_QUESTIONS,
    Trip,
    Weather,
)
from tests.clients.snippets import run_snippet


def chat(server: Server, **settings: Any) -> ChatOpenAI:
    fields = {"model": server.model, "base_url": server.url, "api_key": KEY, "max_retries": 0}
    return ChatOpenAI(**fields | settings)


@pytest.mark.parametrize(("question", "cities"), [(QUESTION, ["Paris"]), (TWO_QUESTIONS, ["Paris", "Oslo"])])
def test_a_loop_of_tool_calls(scripted: Server, question: str, cities: list[str]) -> None:
    weather = Weather()
    model = chat(scripted).bind_tools([weather.tool])
    messages: list[Any] = [HumanMessage(question)]
    messages.append(model.invoke(messages))
    assert [call["args"] for call in messages[1].tool_calls] == [{"city": city} for city in cities]
    assert messages[1].response_metadata["finish_reason"] == "tool_calls"
    for call in messages[1].tool_calls:
        messages.append(ToolMessage(weather.tool(call["args"]["city"]), tool_call_id=call["id"]))
    answer = model.invoke(messages)
    assert answer.content == ANSWER
    assert answer.usage_metadata["output_tokens"] > 0


def test_an_agent_by_responses(scripted: Server) -> None:
    weather = Weather()
    model = chat(scripted, use_responses_api=True)
    agent = create_agent(model, tools=[weather.tool], system_prompt="Be brief.")
    messages = agent.invoke({"messages": [("user", TWO_QUESTIONS)]})["messages"]
    assert (messages[-1].text, sorted(weather.cities)) == (ANSWER, ["Oslo", "Paris"])
    assert "".join(chunk.text for chunk in model.stream([HumanMessage(TRIP_QUESTION)])) == TRIP.model_dump_json()
    assert model.with_structured_output(Trip).invoke(TRIP_QUESTION) == TRIP


def test_an_agent(scripted: Server) -> None:
    weather = Weather()
    agent = create_agent(chat(scripted), tools=[weather.tool], system_prompt="Be brief.")
    result = agent.invoke({"messages": [("user", QUESTION)]})
    assert [message.type for message in result["messages"]] == ["human", "ai", "tool", "ai"]
    assert (result["messages"][-1].content, weather.cities) == (ANSWER, ["Paris"])


async def test_a_streamed_agent(scripted: Server) -> None:
    weather = Weather()
    agent = create_agent(chat(scripted, stream_usage=True), tools=[weather.tool])
    question: Any = {"messages": [("user", QUESTION)]}
    chunks = [chunk async for chunk, _ in agent.astream(question, stream_mode="messages")]
    pieces = [chunk.content for chunk in chunks if isinstance(chunk, AIMessageChunk) and chunk.content]
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 3
    assert weather.cities == ["Paris"]


def test_a_streamed_call(scripted: Server) -> None:
    """Chunks add up to a message with whole arguments and the usage."""
    model = chat(scripted, stream_usage=True).bind_tools([Weather().tool])
    whole: Any = None
    for chunk in model.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Paris"}]
    assert whole.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_typed_answer(embedded: Server, method: Any) -> None:
    model = chat(embedded).with_structured_output(Trip, method=method, include_raw=True)
    result = model.invoke(TRIP_QUESTION)
    assert result["parsing_error"] is None
    assert isinstance(result["parsed"], Trip)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_streamed_typed_answer(embedded: Server, method: Any) -> None:
    *_, last = chat(embedded).with_structured_output(Trip, method=method).stream(TRIP_QUESTION)
    assert isinstance(last, Trip)


@pytest.mark.parametrize("choice", ["any", "book"])
def test_a_demanded_call(embedded: Server, choice: str) -> None:
    """LangChain's `any` is `required` in the API."""

    def book(trip: Trip) -> None:
        """Book a trip."""

    model = chat(embedded, temperature=0).bind_tools([book], tool_choice=choice, parallel_tool_calls=False)
    (call,) = model.invoke(TRIP_QUESTION).tool_calls
    assert Trip.model_validate(call["args"]["trip"])


def test_an_agent_with_a_typed_answer(scripted: Server) -> None:
    agent = create_agent(chat(scripted), tools=[], response_format=Trip)
    assert agent.invoke({"messages": [("user", TRIP_QUESTION)]})["structured_response"] == TRIP


def test_errors(embedded: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        chat(embedded, model="gpt-5").invoke(QUESTION)
    with pytest.raises(ContextOverflowError) as caught:
        chat(embedded).invoke(TOO_LONG)
    assert isinstance(caught.value, openai.BadRequestError)
    with pytest.raises(ContextOverflowError):
        next(iter(chat(embedded).stream(TOO_LONG)))
    with pytest.raises(openai.AuthenticationError):
        chat(embedded, api_key="wrong").invoke(QUESTION)


def test_an_error_in_a_stream(scripted: Server) -> None:
    with pytest.raises(openai.APIError, match="the worker died"):
        list(chat(scripted).stream(FATAL))


def test_the_documentation(scripted: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_snippet("LangChain", scripted)
    assert capsys.readouterr().out == f"{ANSWER}\n{TRIP!r}\n"

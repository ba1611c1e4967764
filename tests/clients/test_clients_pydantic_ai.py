"""pydantic-ai, with its provider for OpenAI's API and the one for vLLM's."""

from typing import Any

import pytest
from pydantic_ai import (
    Agent,
    ModelAuthenticationError,
    ModelContextWindowExceededError,
    ModelNotFoundError,
    ModelServerError,
    NativeOutput,
    PromptedOutput,
    ThinkingPart,
    ToolOutput,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider

from tests.clients.conftest import Server
from tests.clients.conversation import (
    ANSWER,
    FATAL,
    KEY,
    QUESTION,
    THOUGHT,
    TOO_LONG,
    TRIP,
    TRIP_QUESTION,
    TWO_QUESTIONS,
    Trip,
    Weather,
)
from tests.clients.snippets import run_snippet

PROVIDERS = [OpenAIProvider, VLLMProvider]


def agent(
    server: Server, provider: Any = VLLMProvider, *, model: str = "", key: str = KEY, **fields: Any
) -> Agent[None, Any]:
    return Agent(OpenAIChatModel(model or server.model, provider=provider(base_url=server.url, api_key=key)), **fields)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("question", "cities"), [(QUESTION, ["Paris"]), (TWO_QUESTIONS, ["Paris", "Oslo"])])
async def test_a_loop_of_tool_calls(scripted: Server, provider: Any, question: str, cities: list[str]) -> None:
    weather = Weather()
    result = await agent(scripted, provider, instructions="Be brief.", tools=[weather.tool]).run(question)
    assert (result.output, sorted(weather.cities)) == (ANSWER, sorted(cities))
    assert result.usage.output_tokens > 0


async def test_responses(scripted: Server) -> None:
    """What the model thought goes back with its calls."""
    weather = Weather()
    model = OpenAIResponsesModel(scripted.model, provider=OpenAIProvider(base_url=scripted.url, api_key=KEY))
    result = await Agent(model, tools=[weather.tool]).run(QUESTION)
    assert (result.output, weather.cities) == (ANSWER, ["Paris"])
    assert (await Agent(model, output_type=NativeOutput(Trip)).run(TRIP_QUESTION)).output == TRIP
    async with Agent(model).run_stream(TRIP_QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == TRIP.model_dump_json()
    assert len(pieces) > 3


async def test_reasoning(scripted: Server) -> None:
    result = await agent(scripted, tools=[Weather().tool]).run(QUESTION)
    thoughts = [part.content for message in result.all_messages() for part in message.parts if is_thinking(part)]
    assert [thought.strip() for thought in thoughts] == [THOUGHT]


def is_thinking(part: Any) -> bool:
    return isinstance(part, ThinkingPart)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_streamed_loop_of_tool_calls(scripted: Server, provider: Any) -> None:
    weather = Weather()
    async with agent(scripted, provider, tools=[weather.tool]).run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 3
    assert weather.cities == ["Paris"]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("output", [ToolOutput, NativeOutput])
async def test_a_typed_answer(embedded: Server, provider: Any, output: Any) -> None:
    result = await agent(embedded, provider, output_type=output(Trip), retries=0).run(TRIP_QUESTION)
    assert isinstance(result.output, Trip)


async def test_a_typed_answer_by_the_prompt(scripted: Server) -> None:
    """The client asks for any JSON object, and tells the model the schema."""
    result = await agent(scripted, output_type=PromptedOutput(Trip), retries=0).run(TRIP_QUESTION)
    assert result.output == TRIP


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput])
async def test_a_streamed_typed_answer(embedded: Server, output: Any) -> None:
    async with agent(embedded, output_type=output(Trip), retries=0).run_stream(TRIP_QUESTION) as result:
        assert isinstance(await result.get_output(), Trip)


async def test_errors(embedded: Server) -> None:
    with pytest.raises(ModelNotFoundError):
        await agent(embedded, model="gpt-5").run(QUESTION)
    with pytest.raises(ModelContextWindowExceededError):
        await agent(embedded).run(TOO_LONG)
    with pytest.raises(ModelContextWindowExceededError):
        async with agent(embedded).run_stream(TOO_LONG):
            pass
    with pytest.raises(ModelAuthenticationError):
        await agent(embedded, key="wrong").run(QUESTION)


async def test_an_error_in_a_stream(scripted: Server) -> None:
    with pytest.raises(ModelServerError, match="the worker died"):
        async with agent(scripted).run_stream(FATAL) as result:
            await result.get_output()


def test_the_documentation(scripted: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_snippet("pydantic-ai", scripted)
    assert capsys.readouterr().out == f"{ANSWER}\n{TRIP!r}\n"

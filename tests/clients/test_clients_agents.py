"""OpenAI's Agents SDK, with its models for both APIs; by default it uses responses."""

from typing import Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.items import ReasoningItem, ToolCallItem, ToolCallOutputItem
from pydantic import BaseModel

from tests.clients.conftest import Server
from tests.clients.conversation import (
    ANSWER,
    KEY,
    QUESTION,
    RESULT,
    TOO_LONG,
    TRIP,
    TRIP_QUESTION,
    TWO_QUESTIONS,
    Trip,
    Weather,
)
from tests.clients.snippets import run_snippet

set_tracing_disabled(True)  # traces go to OpenAI


Api = type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def api(request: pytest.FixtureRequest) -> Api:
    return request.param


def agent(api: Api, server: Server, model: str = "", **fields: Any) -> Agent[Any]:
    client = openai.AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0)
    return Agent(name="guide", model=api(model or server.model, client), **fields)


@pytest.mark.parametrize(("question", "cities"), [(QUESTION, ["Paris"]), (TWO_QUESTIONS, ["Paris", "Oslo"])])
async def test_a_loop_of_tool_calls(api: Api, scripted: Server, question: str, cities: list[str]) -> None:
    weather = Weather()
    guide = agent(api, scripted, instructions="Be brief.", tools=[function_tool(weather.tool)])
    result = await Runner.run(guide, question)
    assert result.final_output == ANSWER
    assert sorted(weather.cities) == sorted(cities)  # they are called side by side
    outputs = [item.output for item in result.new_items if isinstance(item, ToolCallOutputItem)]
    assert outputs == [RESULT] * len(cities)


async def test_a_streamed_loop_of_tool_calls(api: Api, scripted: Server) -> None:
    weather = Weather()
    result = Runner.run_streamed(agent(api, scripted, tools=[function_tool(weather.tool)]), QUESTION)
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(pieces) == result.final_output == ANSWER
    assert len(pieces) > 3
    assert weather.cities == ["Paris"]
    kinds = {type(item) for item in result.new_items}
    assert {ReasoningItem, ToolCallItem, ToolCallOutputItem} <= kinds


async def test_a_typed_answer(api: Api, embedded: Server) -> None:
    result = await Runner.run(agent(api, embedded, output_type=Trip), TRIP_QUESTION)
    assert isinstance(result.final_output, Trip)


async def test_a_streamed_typed_answer(api: Api, embedded: Server) -> None:
    result = Runner.run_streamed(agent(api, embedded, output_type=Trip), TRIP_QUESTION)
    async for _ in result.stream_events():
        pass
    assert isinstance(result.final_output, Trip)


async def test_a_demanded_call(api: Api, embedded: Server) -> None:
    """A small model calls if it must, by the tool's schema, and its next turn is free again."""
    trips: list[Trip] = []

    @function_tool
    def book(trip: Trip) -> str:
        """Book a trip."""
        trips.append(trip)
        return "booked"

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0)
    guide = agent(api, embedded, tools=[book], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    result = await Runner.run(guide, TRIP_QUESTION)
    assert result.final_output == "booked"
    assert [type(trip) for trip in trips] == [Trip]


class City(BaseModel):
    """What is said with a handoff."""

    city: str


async def check_city(context: Any, city: City) -> None:
    assert city.city == "Paris"


async def test_a_handoff(api: Api, scripted: Server) -> None:
    """An agent hands over to another by a call of a tool that the SDK makes."""
    guide = agent(api, scripted, instructions=f"The weather is {RESULT}.")
    to_guide = handoff(guide, tool_name_override="get_weather", input_type=City, on_handoff=check_city)
    desk = agent(api, scripted, handoffs=[to_guide])
    result = await Runner.run(desk, QUESTION)
    assert result.last_agent is guide
    assert result.final_output == ANSWER


async def test_errors(api: Api, embedded: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        await Runner.run(agent(api, embedded, model="gpt-5"), QUESTION)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await Runner.run(agent(api, embedded), TOO_LONG)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        async for _ in Runner.run_streamed(agent(api, embedded), TOO_LONG).stream_events():
            pass


def test_the_documentation(scripted: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_snippet("OpenAI Agents SDK", scripted)
    assert capsys.readouterr().out == f"{ANSWER}\n{TRIP!r}\n"

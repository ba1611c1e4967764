"""Hugging Face's smolagents. Its agents demand a call in each turn, and end by calling `final_answer`."""

import openai
import pytest
from smolagents import OpenAIModel, Tool, ToolCallingAgent

from tests.clients.conftest import Server
from tests.clients.conversation import ANSWER, FINAL_RESULT, KEY, QUESTION, TOO_LONG
from tests.clients.snippets import run_snippet


class Weather(Tool):
    """The tool as a class, which is how one with a state is written."""

    name = "get_weather"
    description = "Get the weather in a city."
    inputs = {"city": {"type": "string", "description": "The name of the city."}}
    output_type = "string"

    def __init__(self) -> None:
        super().__init__()
        self.cities: list[str] = []

    def forward(self, city: str) -> str:
        self.cities.append(city)
        return FINAL_RESULT


def model(server: Server, name: str = "") -> OpenAIModel:
    return OpenAIModel(name or server.model, api_base=server.url, api_key=KEY, client_kwargs={"max_retries": 0})


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tool_calls(scripted: Server, stream: bool) -> None:
    weather = Weather()
    agent = ToolCallingAgent([weather], model(scripted), stream_outputs=stream, verbosity_level=0, max_steps=3)
    assert agent.run(QUESTION) == ANSWER
    assert weather.cities == ["Paris"]


def test_a_demanded_call(embedded: Server) -> None:
    message = model(embedded).generate(
        [{"role": "user", "content": QUESTION}], tools_to_call_from=[Weather()], max_tokens=300, temperature=0
    )
    assert message.tool_calls
    assert message.tool_calls[0].function.name == "get_weather"


def test_errors(embedded: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        model(embedded, "gpt-5").generate([{"role": "user", "content": QUESTION}])
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        model(embedded).generate([{"role": "user", "content": TOO_LONG}])


def test_the_documentation(scripted: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_snippet("smolagents", scripted)
    assert capsys.readouterr().out == f"{ANSWER}\n"

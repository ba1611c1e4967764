"""LlamaIndex, by its model for APIs like OpenAI's."""

from typing import Any

import openai
import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike

from tests.clients.conftest import Server
from tests.clients.conversation import ANSWER, KEY, QUESTION, TOO_LONG, TRIP, TRIP_QUESTION, Trip, Weather
from tests.clients.snippets import run_snippet


def model(server: Server, **settings: Any) -> OpenAILike:
    fields: dict[str, Any] = {
        "model": server.model,
        "api_base": server.url,
        "api_key": KEY,
        "context_window": 4096,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "max_retries": 0,
    }
    return OpenAILike(**fields | settings)


async def test_a_streamed_loop_of_tool_calls(scripted: Server) -> None:
    """An agent of LlamaIndex streams by itself."""
    weather = Weather()
    agent = FunctionAgent(tools=[weather.tool], llm=model(scripted))
    handler = agent.run(QUESTION)
    pieces = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    assert str(await handler) == ANSWER
    assert "".join(pieces).endswith(ANSWER)
    assert weather.cities == ["Paris"]


def test_a_typed_answer(embedded: Server) -> None:
    """It is the call of a function, which is demanded."""
    trip = model(embedded).structured_predict(Trip, PromptTemplate(TRIP_QUESTION))
    assert isinstance(trip, Trip)


def test_a_streamed_typed_answer(scripted: Server) -> None:
    """In a stream it does not demand the call, so the model has to make it of its own accord."""
    parts = list(model(scripted).stream_structured_predict(Trip, PromptTemplate(TRIP_QUESTION)))
    assert parts[-1].model_dump() == TRIP.model_dump()
    assert len(parts) > 3


def test_errors(embedded: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        model(embedded, model="gpt-5").chat([ChatMessage(QUESTION)])
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        model(embedded).chat([ChatMessage(TOO_LONG)])


def test_the_documentation(scripted: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_snippet("LlamaIndex", scripted)
    assert capsys.readouterr().out == f"{TRIP!r}\n"

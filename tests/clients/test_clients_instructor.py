"""Instructor, in its modes that a server has to support."""

from collections.abc import Iterable
from typing import Any

import instructor
import openai
import pytest
from instructor import Mode

from tests.clients.conftest import Server
from tests.clients.conversation import KEY, QUESTION, TOO_LONG, TRIP, TRIP_QUESTION, TWO_QUESTIONS, Trip
from tests.clients.snippets import run_snippet


class ClosedTrip(Trip, extra="forbid"):
    """The same, with a schema that says that there are no other fields, as `JSON_SCHEMA` sends it as it is."""


MODES = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA]


def client(server: Server, mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0), mode=mode)


def asked(text: str, model: str = "smol") -> Any:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_retries": 0}


@pytest.mark.parametrize("mode", MODES)
def test_a_typed_answer(embedded: Server, mode: Mode) -> None:
    trip, answer = client(embedded, mode).chat.completions.create_with_completion(
        response_model=ClosedTrip, **asked(TRIP_QUESTION)
    )
    assert isinstance(trip, Trip)
    assert answer.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.MD_JSON])
def test_a_typed_answer_by_the_prompt(scripted: Server, mode: Mode) -> None:
    trip = client(scripted, mode).chat.completions.create(response_model=Trip, **asked(TRIP_QUESTION, "tiny"))
    assert trip.model_dump() == TRIP.model_dump()


@pytest.mark.parametrize("mode", MODES)
def test_a_streamed_typed_answer(embedded: Server, mode: Mode) -> None:
    partial = list(
        client(embedded, mode).chat.completions.create_partial(response_model=ClosedTrip, **asked(TRIP_QUESTION))
    )
    assert len(partial) > 3
    assert Trip.model_validate(partial[-1].model_dump())


def test_several_calls_at_once(scripted: Server) -> None:
    """Each class is a tool, and the answer is a list of calls."""

    class get_weather(instructor.OpenAISchema):
        """Get the weather in a city."""

        city: str

    calls = client(scripted, Mode.PARALLEL_TOOLS).chat.completions.create(
        response_model=Iterable[get_weather], **asked(TWO_QUESTIONS, "tiny")
    )
    assert [call.city for call in calls] == ["Paris", "Oslo"]


@pytest.mark.parametrize("mode", MODES)
def test_errors(embedded: Server, mode: Mode) -> None:
    """Instructor wraps a client's errors in its own, after its retries."""
    for model, text, cause in (("gpt-5", QUESTION, openai.NotFoundError), ("smol", TOO_LONG, openai.BadRequestError)):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            client(embedded, mode).chat.completions.create(response_model=Trip, **asked(text, model))
        causes = [caught.value, caught.value.__cause__, getattr(caught.value.__cause__, "__cause__", None)]
        assert any(isinstance(error, cause) for error in causes), causes


def test_the_documentation(scripted: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_snippet("Instructor", scripted)
    assert capsys.readouterr().out == f"{TRIP!r}\n"

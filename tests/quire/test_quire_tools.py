"""A real model calls tools: the embedded one, through `quire serve`. It is shown two calls before, or has to call."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from shared.hub.checkpoint import locate
from tests.quire.quire_server import Server, serving
from tests.text.tool_templates import TEMPLATES

NAME = "smol"

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def turn(city: str, weather: str, number: int) -> list[dict[str, Any]]:
    """Return a question, the call that it needs, the result, and the answer."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    call = {"id": f"call{number}", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"Weather in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call{number}", "content": weather},
        {"role": "assistant", "content": f"It is {weather}."},
    ]


QUESTION: Any = [*turn("Rome", "sunny", 1), *turn("Oslo", "cold", 2), {"role": "user", "content": "Weather in Paris?"}]


FORECAST = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
SWITCH = {
    "type": "object",
    "properties": {"lights": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}},
    "required": ["lights"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("forecast", FORECAST), ("switch", SWITCH))
]
NAMED: Any = {"type": "function", "function": {"name": "forecast"}}


def fits(name: str, arguments: Any) -> bool:
    """Return whether arguments fit the schema of a tool of `TOOLS`."""
    if name == "switch":
        lights = arguments.pop("lights")
        return arguments == {} and 1 <= len(lights) <= 3 and all(isinstance(light, bool) for light in lights)
    city, days, unit = (arguments.pop(key) for key in ("city", "days", "unit"))
    return arguments == {} and len(city) <= 12 and type(days) is int and 1 <= days <= 9 and unit in ("C", "F")


def ask(
    client: openai.OpenAI, server: Server, *, kill: bool = False, **fields: Any
) -> tuple[str | None, str, str, str]:
    """Return the finish reason, and the joined content, name and arguments of a stream.

    If `kill`, the worker dies in the midst of the call.
    """
    finish, content, name, arguments = None, "", "", ""
    body: Any = {"messages": QUESTION, "tools": [TOOL], "temperature": 0, "max_tokens": 200} | fields
    for chunk in client.chat.completions.create(model=NAME, stream=True, **body):
        (choice,) = chunk.choices
        finish = choice.finish_reason
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments
            if kill:
                server.children()["worker"].kill()
                kill = False
    assert not kill
    return finish, content, name, arguments


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tools")
    template = folder / "hermes.jinja"
    template.write_text(TEMPLATES["hermes"])
    flags = ("--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving(locate(""), folder, *flags, name=NAME) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120) as client:
        yield client


def test_a_call_of_a_real_model_survives_its_worker(server: Server, client: openai.OpenAI) -> None:
    """TOL-01, and a kill in the midst of a call is a pause."""
    answer = client.chat.completions.create(
        model=NAME, messages=QUESTION, tools=[TOOL], temperature=0, max_tokens=80
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    undisturbed = ask(client, server)
    assert undisturbed == ("tool_calls", "", "get_weather", call.function.arguments)
    assert ask(client, server, kill=True) == undisturbed


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_that_are_demanded_fit_their_schemas(client: openai.OpenAI, choice: Any) -> None:
    """TOL-08: at temperature 1, by a model that would write anything else."""
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Tell me a story about a cat."}],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=1,
        seed=1,
        n=16,
        max_tokens=200,
    )
    assert len(answer.choices) == 16
    for sample in answer.choices:
        assert sample.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert sample.message.content is None
        (call,) = sample.message.tool_calls or ()
        assert choice == "required" or call.function.name == "forecast"
        assert fits(call.function.name, json.loads(call.function.arguments)), call.function


def test_a_demanded_call_survives_its_worker(server: Server, client: openai.OpenAI) -> None:
    """The next worker's matcher follows what the first one has written."""
    messages = [{"role": "user", "content": "Tell me a story about a cat."}]
    fields = {"messages": messages, "tools": TOOLS, "tool_choice": NAMED, "temperature": 1, "seed": 7}
    undisturbed = ask(client, server, **fields)
    assert undisturbed[:3] == ("stop", "", "forecast")
    assert fits("forecast", json.loads(undisturbed[3]))
    assert ask(client, server, kill=True, **fields) == undisturbed


def test_an_answer_of_a_form_or_a_strict_call(client: openai.OpenAI) -> None:
    """Whichever the model prefers, and at temperature 1, it is one of the two."""
    strict: Any = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    form: Any = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": FORECAST}}
    answer = client.chat.completions.create(
        model=NAME,
        messages=QUESTION,
        tools=strict,
        parallel_tool_calls=False,
        response_format=form,
        temperature=1,
        seed=1,
        n=8,
        max_tokens=300,
    )
    for sample in answer.choices:
        calls = sample.message.tool_calls or ()
        assert sample.finish_reason == ("tool_calls" if calls else "stop")
        assert all(fits(call.function.name, json.loads(call.function.arguments)) for call in calls)
        assert calls or fits("forecast", json.loads(sample.message.content or ""))

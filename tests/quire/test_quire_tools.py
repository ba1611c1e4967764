"""A real model calls a tool: the embedded one, which is shown two calls before, through `quire serve`."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from shared.hub.checkpoint import locate
from tests.quire.quire_server import Server, serving
from tests.text.tool_templates import TEMPLATES

NAME = "smol"

pytestmark = pytest.mark.timeout(300)

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


def ask(client: openai.OpenAI, server: Server, *, kill: bool = False) -> tuple[str | None, str, str, str]:
    """Return the finish reason, and the joined content, name and arguments of a stream.

    If `kill`, the worker dies in the midst of the call.
    """
    finish, content, name, arguments = None, "", "", ""
    for chunk in client.chat.completions.create(
        model=NAME, messages=QUESTION, tools=[TOOL], temperature=0, max_tokens=80, stream=True
    ):
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


def test_a_call_of_a_real_model_survives_its_worker(tmp_path: Path) -> None:
    """TOL-01, and a kill in the midst of a call is a pause."""
    template = tmp_path / "hermes.jinja"
    template.write_text(TEMPLATES["hermes"])
    flags = ("--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with (
        serving(locate(""), tmp_path, *flags, name=NAME) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120) as client,
    ):
        answer = client.chat.completions.create(
            model=NAME, messages=QUESTION, tools=[TOOL], temperature=0, max_tokens=80
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls or ()
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        undisturbed = ask(client, server)
        assert undisturbed == ("tool_calls", "", "get_weather", call.function.arguments)
        assert ask(client, server, kill=True) == undisturbed

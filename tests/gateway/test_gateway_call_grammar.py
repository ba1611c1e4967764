"""Tests calls that are demanded: which grammar reaches the engine, what a client gets, and what is refused."""

from typing import Any

import pytest

from shared.structured_outputs import StructuredOutputsParams
from shared.text.grammars import grammar_text
from shared.text.message_grammar import message_grammar
from shared.text.message_parser import MessageFormat, ParserChoice
from tests.gateway.fakes import FakeBackend, ends, serve
from tests.gateway.test_gateway_reasoning import OPENS, THINKING
from tests.gateway.test_gateway_structured_outputs import FORMAT, SCHEMA
from tests.gateway.test_gateway_tools import (
    HERMES,
    MESSAGES,
    PARAMETERS,
    PATH,
    TIME,
    TOOL,
    TOOLS,
    WEATHER,
    calls_of,
    joined,
    scripted,
)
from tests.text.tool_outputs import WRITERS
from tests.text.tool_templates import TEMPLATES
from tests.text.vocabulary import CHATML

SCHEMAS = {"get_weather": PARAMETERS, "get-time.now": {}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
STRICT = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}

ANSWER = grammar_text(StructuredOutputsParams(json=SCHEMA))


async def grammar_of(template: str, settings: dict[str, Any] | None = None, **fields: Any) -> str:
    """Return the grammar that reaches the engine."""
    backend = scripted("one")
    async with serve(backend, template=template, **settings or {}) as client:
        await client.chat(**fields)
    (request,) = backend.requests
    return request.sampling.grammar


def expected(*, tools: Any = SCHEMAS, reasoning: str | None = None, answer: str = "", **demand: bool) -> str:
    """Return the grammar of a model with Hermes' calls."""
    states = {name: demand.pop(name) for name in ("parallel", "reasoning_is_open", "reasoning_is_over") & demand.keys()}
    return message_grammar(MessageFormat(ParserChoice(reasoning, "hermes"), tools, **states), answer, **demand)


async def test_a_demand_for_calls_reaches_the_engine() -> None:
    """TOL-08."""
    tools: dict[str, Any] = {"tools": TOOLS}
    required = await grammar_of(HERMES, tool_choice="required", **tools)
    assert required == expected(must_call=True)
    one = await grammar_of(HERMES, tool_choice="required", parallel_tool_calls=False, **tools)
    assert one == expected(must_call=True, parallel=False)
    named = await grammar_of(HERMES, tool_choice=NAMED, **tools)
    assert named == expected(tools={"get_weather": PARAMETERS}, must_call=True, parallel=False)
    assert len({required, one, named}) == 3
    for choice in ("auto", None):
        assert await grammar_of(HERMES, tool_choice=choice, **tools) == expected()
    assert await grammar_of(HERMES, tool_choice="none", **tools) == ""
    assert await grammar_of(HERMES, tools=[STRICT]) == expected(tools={"get_weather": PARAMETERS})
    assert await grammar_of(HERMES, tools=[STRICT], tool_choice="none") == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
async def test_without_a_call_the_reason_is_not_a_call(choice: Any, stream: bool) -> None:
    """TOL-08: an engine that does not enforce it, or max_tokens, may leave an answer without its call."""
    async with serve(scripted("one two"), template=HERMES) as client:
        fields = {"tools": TOOLS, "tool_choice": choice}
        if stream:
            chunks = await client.stream_chat(**fields)
            message, reasons = joined(chunks)[0], ends(chunks)[0]
        else:
            (answer,) = (await client.chat(**fields))["choices"]
            message, reasons = answer["message"], [answer["finish_reason"]]
    assert (message["content"], "tool_calls" in message, reasons) == ("one two", False, ["stop"])


async def test_tools_beside_a_form_of_the_answer() -> None:
    """An answer of the form or calls; without tools the form alone; with a demanded call that alone."""
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": FORMAT}
    assert await grammar_of(HERMES, **fields) == expected(answer=ANSWER)
    assert await grammar_of(HERMES, tool_choice="none", **fields) == ANSWER
    assert await grammar_of(HERMES, tool_choice="required", **fields) == expected(must_call=True)


async def test_a_form_begins_behind_the_reasoning() -> None:
    """Unless the template has closed it, or the model's reasoning is not told apart."""
    form = {"response_format": FORMAT}
    free, opened = (
        expected(tools=None, reasoning="qwen3", answer=ANSWER, reasoning_is_open=is_open) for is_open in (False, True)
    )
    assert len({free, opened, ANSWER}) == 3
    assert await grammar_of(THINKING, **form) == free
    assert await grammar_of(OPENS, **form) == opened
    closes = OPENS + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    assert await grammar_of(closes, chat_template_kwargs={"enable_thinking": False}, **form) == ANSWER
    assert await grammar_of(closes, **form) == opened
    assert await grammar_of(THINKING, {"reasoning_parser": "none"}, **form) == ANSWER
    messages = [*MESSAGES, {"role": "assistant", "content": "So: "}]
    continues = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert await grammar_of(THINKING, **continues, **form) == ANSWER
    messages[-1]["content"] = "<think>So: "
    assert await grammar_of(THINKING, **continues, **form) == opened


@pytest.mark.parametrize(
    ("choice", "reason"), [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")], ids=str
)
async def test_the_finish_reason_after_calls(choice: Any, reason: str) -> None:
    """TOL-09: a call that was named ends in `stop`, as with OpenAI."""
    fields = {"tools": TOOLS, "tool_choice": choice}
    async with serve(scripted(WRITERS["hermes"]([WEATHER])), template=HERMES) as client:
        (whole,) = (await client.chat(**fields))["choices"]
        chunks = await client.stream_chat(**fields)
    assert whole["finish_reason"] == reason
    assert ends(chunks) == {0: [reason]}
    assert calls_of(whole["message"]) == calls_of(joined(chunks)[0]) == [WEATHER]


async def test_a_named_tool_is_called_once() -> None:
    async with serve(scripted(WRITERS["hermes"]([WEATHER, TIME])), template=HERMES) as client:
        (choice,) = (await client.chat(tools=TOOLS, tool_choice=NAMED))["choices"]
    assert calls_of(choice["message"]) == [WEATHER]


BOMB = {"properties": {f"property {at}": {"type": "string"} for at in range(3000)}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("family", "parameters", "words"),
    [
        ("hermes", {"properties": {"a": {"type": "strng"}}}, "strng"),
        ("hermes", {"properties": [1]}, "properties"),
        ("hermes", {"properties": {"a": 1}}, "schema"),
        ("hermes", {"properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}}, "look-around"),
        ("hermes", BOMB, ""),
        ("qwen3_coder", {"properties": {"a": {"type": "strng"}}}, "strng"),
        ("qwen3_coder", {"properties": [1]}, "properties"),
        ("qwen3_coder", {"properties": {"a": 1}}, "must be an object"),
        ("llama4_pythonic", {"properties": {"a": {"type": "strng"}}}, "strng"),
        ("llama4_pythonic", {"required": 1}, "required"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_schema_that_cannot_be_enforced_is_refused(
    family: str, parameters: Any, words: str, stream: bool
) -> None:
    """If calls are enforced, by its place in the request. Otherwise a schema is only shown."""
    backend = FakeBackend(max_model_len=1_000_000)
    body = {"messages": MESSAGES, "stream": stream}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with serve(backend, template=TEMPLATES[family]) as client:
        for fields in (
            {"tools": [TOOL, tool], "tool_choice": "required"},
            {"tools": [TOOL, {"type": "function", "function": {**tool["function"], "strict": True}}]},
        ):
            status, error = await client.refused(PATH, body | fields)
            path = "tools" if parameters is BOMB else "tools[1].function.parameters"
            assert (status, error["param"]) == (400, path)
            assert error["message"].startswith(path)
            assert words in error["message"]
            assert "%json" not in error["message"], "the client knows no grammar"
            assert "rule" not in error["message"]
        assert not backend.requests
        await client.chat(tools=[tool])
    (request,) = backend.requests
    assert request.sampling.grammar == ""


async def test_demands_that_cannot_be_met_are_refused() -> None:
    """TOL-08: a call needs a parser; calls without a marker cannot be told from an answer of a form."""
    shows_tools = "{{ tools }}" + CHATML
    async with serve(template=shows_tools, tool_call_parser="none") as client:
        for choice in ("required", NAMED):
            body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": choice}
            status, error = await client.refused(PATH, body)
            assert (status, error["param"]) == (400, "tool_choice")
            assert "--tool-call-parser" in error["message"]
    async with serve(scripted("one"), template=shows_tools, tool_call_parser="llama3_json") as client:
        fields = {"tools": [TOOL], "response_format": FORMAT}
        status, error = await client.refused(PATH, {"messages": MESSAGES} | fields)
        assert (status, error["param"]) == (400, "tools")
        assert "no marker" in error["message"]
        await client.chat(tool_choice="required", **fields)

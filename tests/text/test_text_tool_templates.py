"""Tests of conversations with tools through templates: what a template prints of a call is what its parser reads."""

import json
from typing import Any

import pytest

from shared.text.message_parser import ParserChoice
from shared.text.template import ChatTemplate
from tests.text.tool_outputs import TOOLS, Call, parser_of, read
from tests.text.tool_templates import ONE_CALL, TEMPLATES
from tests.text.vocabulary import CHATML, make_tokenizer

TOOL_LIST = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in TOOLS.items()
]
WEATHER = Call("get_weather", {"city": 'São "Paulo"', "days": 3, "options": {"a": [1, {"b": None}]}})
TIME = Call("get-time.now", {"any": "x"})


def conversation(calls: list[tuple[str, Call, Any]], **fields: Any) -> list[dict[str, Any]]:
    """Return a conversation with these calls, as (id, call, arguments as they are written)."""
    tool_calls = [
        {"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
        for id, call, arguments in calls
    ]
    results = [{"role": "tool", "tool_call_id": id, "content": f"result of {id}"} for id, _, _ in calls]
    first = {"role": "user", "content": "hi"}
    return [first, {"role": "assistant", "content": None, "tool_calls": tool_calls} | fields, *results]


def make_calls(family: str) -> list[tuple[str, Call, str]]:
    """Return calls as OpenAI's API has them in a history, with arguments in JSON."""
    calls = [WEATHER] if family in ONE_CALL else [WEATHER, TIME]
    ids = [f"functions.{call.name}:{index}" for index, call in enumerate(calls)]
    if family != "kimi_k2":
        ids = ["abcdefgh0", "abcdefgh1"]
    return [(id, call, json.dumps(call.arguments)) for id, call in zip(ids, calls, strict=False)]


@pytest.mark.parametrize("family", TEMPLATES)
def test_auto_chooses_the_family(family: str) -> None:
    choice = ParserChoice.make(TEMPLATES[family], make_tokenizer(), tool_parser="auto", reasoning_parser="auto")
    assert choice.tools == family
    assert choice.reasoning == {"openai": "openai_gptoss", "deepseek_v3": "qwen3", "deepseek_v31": "qwen3"}.get(family)


def test_auto_chooses_none_for_a_template_without_markers() -> None:
    tokenizer = make_tokenizer()
    assert ParserChoice.make(CHATML, tokenizer, tool_parser="auto", reasoning_parser="auto") == ParserChoice()
    choice = ParserChoice.make(TEMPLATES["hermes"], tokenizer, tool_parser="none", reasoning_parser="none")
    assert choice == ParserChoice()
    choice = ParserChoice.make(CHATML, tokenizer, tool_parser="mistral", reasoning_parser="granite")
    assert (choice.tools, choice.reasoning) == ("mistral", "granite")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<think>", "qwen3"),
        ("Here is my thought process:", "granite"),
        ("<think><|tool_calls_section_begin|>", "kimi_k2"),
    ],
)
def test_auto_chooses_a_reasoning_parser(template: str, name: str) -> None:
    choice = ParserChoice.make(template, make_tokenizer(), tool_parser="none", reasoning_parser="auto")
    assert choice.reasoning == name


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_a_template_prints_of_calls_is_what_the_parser_reads(family: str) -> None:
    """TPL-01: content that is null is nothing, and arguments in JSON are what the template needs."""
    calls = make_calls(family)
    template = ChatTemplate(TEMPLATES[family])
    template.sanity_check()
    prompt = template.render(conversation(calls), variables={"tools": TOOL_LIST})
    assert "None" not in prompt
    assert all(f"result of {id}" in prompt for id, _, _ in calls)
    assert all(name in prompt for name in TOOLS)
    own = template.render(conversation(calls)[:2], add_generation_prompt=False)
    before = template.render(conversation(calls)[:1], add_generation_prompt=False)
    message = read(parser_of(family), own.removeprefix(before))
    assert message.parsed().calls == tuple(call for _, call, _ in calls)


@pytest.mark.parametrize("family", TEMPLATES)
def test_arguments_may_be_objects_or_json(family: str) -> None:
    template = ChatTemplate(TEMPLATES[family])
    as_json = template.render(conversation(make_calls(family)))
    as_objects = template.render(conversation([(id, call, dict(call.arguments)) for id, call, _ in make_calls(family)]))
    assert as_json == as_objects


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_shows_tools(family: str) -> None:
    assert ChatTemplate(TEMPLATES[family]).shows_tools
    assert not ChatTemplate(CHATML).shows_tools


def test_a_template_that_prints_arguments_as_they_are_gets_json() -> None:
    """Python would print an object with single quotes."""
    source = TEMPLATES["hermes"].replace("call.function.arguments | tojson", "call.function.arguments")
    for content_format in ("auto", "string"):
        prompt = ChatTemplate(source, content_format=content_format).render(conversation(make_calls("hermes")))
        assert '"arguments": {"city": "São \\"Paulo\\"", "days": 3' in prompt


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_in_a_history_has_both_names(name: str) -> None:
    source = "{{ messages[-1].content }}{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}{% endfor %}"
    message = {"role": "assistant", "content": "x", name: "why"}
    assert ChatTemplate(source).render([message]) == "xwhy|why"

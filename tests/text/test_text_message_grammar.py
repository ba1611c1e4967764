"""Tests of the grammar of a whole output: reasoning is free, and what follows is calls, or an answer of some form."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.structured_outputs import StructuredOutputsParams
from shared.text import reasoning_parsers
from shared.text.grammars import grammar_text
from shared.text.message_grammar import message_grammar
from shared.text.message_parser import MessageFormat, ParserChoice
from tests.text.grammar_matcher import Matcher
from tests.text.test_text_call_grammar import TOOLS, WEATHER, WRONG, write
from tests.text.tool_outputs import WRITERS, Call, read

PYTHONIC = {"pythonic", "llama4_pythonic", "lfm2"}  # write values as Python, and the grammar has JSON

ANSWER = grammar_text(StructuredOutputsParams(json={"type": "object", "required": ["sum"]}))
CHOICE = grammar_text(StructuredOutputsParams(choice=["yes", "no"]))


def output_of(
    answer: str = "",
    *,
    reasoning: str | None = None,
    tools: str | None = None,
    tokens: bool = True,
    must_call: bool = False,
    **state: bool,
) -> Matcher:
    """Return a matcher of outputs of a model with these parsers."""

    def make_grammar(ids: Mapping[str, int]) -> str:
        choice = ParserChoice(reasoning, tools, token_ids=ids)
        format = MessageFormat(choice, None if tools is None else TOOLS, **state)
        return message_grammar(format, answer, must_call=must_call)

    markers = ParserChoice(reasoning, tools).markers(with_tools=tools is not None)
    return Matcher(markers, make_grammar, tokens=tokens)


def thought(family: str) -> tuple[str, str]:
    """Return the beginning of some reasoning, and the rest of it."""
    markers = reasoning_parsers.FAMILIES[family]
    return markers.begins[0], f"\nIs {{}} <i>it</i>?\n\n{markers.ends[-1]}"


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("family", reasoning_parsers.FAMILIES)
def test_a_form_is_that_of_the_answer_behind_the_reasoning(family: str, tokens: bool) -> None:
    begin, rest = thought(family)
    whole = begin + rest
    free = output_of(CHOICE, reasoning=family, tokens=tokens)
    opened = output_of(CHOICE, reasoning=family, tokens=tokens, reasoning_is_open=True)
    closed = output_of(CHOICE, reasoning=family, tokens=tokens, reasoning_is_over=True)
    for space in ("", " ", "\n", "\n\n"):
        assert free.matches(f"{whole}{space}yes")
        assert opened.matches(f"{rest}{space}no")
    assert free.matches("no")
    assert closed.matches("yes")
    for wrong in (f"{whole}maybe", f"{whole}yes{whole}yes", "maybe", begin + "yes", f"{whole}\n\n\nyes", whole):
        assert not free.matches(wrong), wrong
    for wrong in ("yes", rest, f"{rest}maybe"):
        assert not opened.matches(wrong), wrong
    assert not closed.matches(f"{whole}yes")
    parser = MessageFormat(ParserChoice(family)).parser()
    assert read(parser, f"{whole}\n\nyes").parsed().content == "yes"


def test_a_marker_that_is_spelled_ends_reasoning_as_its_token_does() -> None:
    """The parser reads text."""
    output = output_of(CHOICE, reasoning="qwen3", reasoning_is_open=True)
    matcher = output._matcher
    spelled = [id for character in "a</think>" for id in output._backend.encode(character).ids]
    assert matcher.deep_copy().try_consume_tokens([*spelled, *output._backend.encode("yes").ids]) == len(spelled) + 3
    assert matcher.deep_copy().try_consume_tokens([*spelled, *output._backend.encode("maybe").ids]) == len(spelled)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("family", sorted(set(WRITERS) - PYTHONIC - {"openai"}))
def test_a_call_is_enforced_behind_the_reasoning(family: str, tokens: bool) -> None:
    call = write(family, tokens, [WEATHER])
    output = output_of(reasoning="qwen3", tools=family, tokens=tokens, must_call=True)
    assert output.matches(call)
    assert output.matches(f"<think>\nWell.\n</think>\n\n{call}")
    assert not output.matches(f"Well. {call}")
    assert not output.matches("<think>\nWell.\n</think>\n\nIt rains.")
    for wrong in WRONG:
        assert not output.matches(f"<think>\nWell.\n</think>\n\n{write(family, tokens, [wrong])}")
    opened = output_of(reasoning="qwen3", tools=family, tokens=tokens, must_call=True, reasoning_is_open=True)
    assert opened.matches(f"Well.\n</think>\n\n{call}")
    assert not opened.matches(call)


@pytest.mark.parametrize("family", sorted(set(WRITERS) - PYTHONIC - {"openai", "llama3_json"}))
def test_either_calls_or_an_answer_of_the_form(family: str) -> None:
    call, wrong = write(family, True, [WEATHER]), write(family, True, [WRONG[0]])
    output = output_of(ANSWER, reasoning="qwen3", tools=family)
    for before in ("", "<think>\nWell.\n</think>\n\n"):
        assert output.matches(before + call)
        assert output.matches(before + '{"sum": 3}')
        for text in (wrong, "It rains.", '{"total": 3}', call + '{"sum": 3}'):
            assert not output.matches(before + text), text


def test_a_call_that_must_be_is_none_of_the_answers_form() -> None:
    output = output_of(ANSWER, tools="hermes", must_call=True)
    assert output.matches(write("hermes", True, [WEATHER]))
    assert not output.matches('{"sum": 3}')


def test_calls_in_text_behind_the_reasoning() -> None:
    output = output_of(reasoning="qwen3", tools="hermes")
    call, wrong = write("hermes", True, [WEATHER]), write("hermes", True, [WRONG[0]])
    for text in ("It rains.", f"I look.\n{call}", call):
        assert output.matches(text)
        assert output.matches(f"<think>\nWell.\n</think>\n\n{text}")
    assert not output.matches(f"<think>\nWell.\n</think>\n\nI look.\n{wrong}")


@pytest.mark.parametrize("family", ["llama3_json", "pythonic"])
def test_calls_without_a_marker_are_not_told_from_text(family: str) -> None:
    """So an answer of a form cannot stand beside them."""
    format = MessageFormat(ParserChoice("qwen3", family), TOOLS)
    with pytest.raises(InvalidRequest, match="have no marker"):
        message_grammar(format, ANSWER)
    assert message_grammar(format, ANSWER, must_call=True) == message_grammar(format, must_call=True) != ""


def test_without_a_demand_an_output_is_free() -> None:
    for choice in (ParserChoice("qwen3", "hermes"), ParserChoice("openai_gptoss", "openai")):
        assert message_grammar(MessageFormat(choice)) == message_grammar(MessageFormat(choice, {})) == ""


def test_an_answer_without_reasoning_has_its_own_grammar() -> None:
    assert message_grammar(MessageFormat(ParserChoice(None, "hermes")), ANSWER) == ANSWER
    over = MessageFormat(ParserChoice("openai_gptoss", "openai"), reasoning_is_over=True)
    assert message_grammar(over, ANSWER) == ANSWER


ANALYSIS = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def harmony(answer: str = "", **demand: Any) -> Matcher:
    return output_of(answer, reasoning="openai_gptoss", tools="openai", **demand)


def call_of(call: Call) -> str:
    return write("openai", True, [call])


def test_harmony_the_form_is_that_of_the_last_channel() -> None:
    output = output_of(ANSWER, reasoning="openai_gptoss")
    for before in ("", ANALYSIS, ANALYSIS + ANALYSIS, ANALYSIS + PREAMBLE):
        assert output.matches(before + FINAL + '{"sum": 3}')
        assert output.matches(f'{before}<|channel|>final <|constrain|>json<|message|>{{"sum": 3}}')
        for wrong in ("It rains.", '{"total": 3}'):
            assert not output.matches(before + FINAL + wrong)
    assert not output.matches('{"sum": 3}')
    assert not output.matches(call_of(WEATHER))


def test_harmony_calls() -> None:
    must, free, either = harmony(must_call=True), harmony(), harmony(ANSWER)
    for before in ("", ANALYSIS, ANALYSIS + PREAMBLE):
        for output in (must, free, either):
            assert output.matches(before + call_of(WEATHER))
            for wrong in WRONG:
                assert not output.matches(before + call_of(wrong))
        text, form = before + FINAL + "It rains.", before + FINAL + json.dumps({"sum": 1})
        assert [output.matches(text) for output in (must, free, either)] == [False, True, False]
        assert [output.matches(form) for output in (must, free, either)] == [False, True, True]

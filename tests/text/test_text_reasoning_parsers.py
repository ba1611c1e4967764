"""Tests of the parsers of reasoning, harmony's among them, and of the choice of parsers by a chat template."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.text.message_parser import MessageFormat, ParserChoice
from shared.text.reasoning_parsers import FAMILIES
from tests.text.tool_outputs import WRITERS, Call, Message, RawMessage, parser_of, read, read_everywhere
from tests.text.vocabulary import make_tokenizer

SAMPLES: list[tuple[str, bool, str, Message]] = [
    # family, whether the prompt ends inside reasoning, output, what is in it
    ("qwen3", False, "<think>\nWell,\n\nyes.\n</think>\n\nYes.", Message("Yes.", "Well,\n\nyes.")),
    ("qwen3", False, "\n<think></think>\nYes.", Message("Yes.")),
    ("qwen3", True, "Well.\n</think>\n\n    indented", Message("    indented", "Well.")),
    ("qwen3", True, "<think>\nWell.</think>Yes.", Message("Yes.", "Well.")),
    ("qwen3", True, "It was cut off \n", Message("", "It was cut off")),
    ("qwen3", False, "  No <think> here </think>", Message("  No <think> here </think>")),
    ("qwen3", False, "<think>a<think>b</think>c</think>d", Message("c</think>d", "a<think>b")),
    ("qwen3", False, "a </thin", Message("a </thin")),
    ("deepseek_r1", True, "Well.\n</think>\n\nYes.", Message("Yes.", "Well.")),
    ("kimi_k2", True, "Call it.<|tool_calls_section_begin|>", Message("", "Call it.")),
    ("granite", False, "Here is my thought process: a, b. Here's my response: c", Message("c", "a, b.")),
    ("granite", False, "Here is my answer", Message("Here is my answer")),
]


@pytest.mark.parametrize(("family", "is_open", "text", "expected"), SAMPLES)
def test_documented_outputs(family: str, is_open: bool, text: str, expected: Message) -> None:
    tools = "kimi_k2" if family == "kimi_k2" else None
    assert read_everywhere(lambda: parser_of(tools, reasoning=family, is_open=is_open), text).parsed() == expected


@pytest.mark.parametrize("family", sorted(set(WRITERS) - {"openai"}))
def test_calls_come_after_reasoning(family: str) -> None:
    """What looks like a call inside the reasoning is a part of it."""
    call = Call("get_weather", {"city": "</think>"})
    inside = WRITERS[family]([Call("get-time.now", {})]).strip()
    text = f"<think>\nI could say {inside}.\n</think>\n\nLet me see.\n{WRITERS[family]([call])}"
    message = read_everywhere(lambda: parser_of(family, reasoning="qwen3"), text)
    assert message.parsed() == Message("Let me see.", f"I could say {inside}.", (call,))


HARMONY: list[tuple[str, Message]] = [
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        Message("Yes.", "Hm."),
    ),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        Message("Let me see.", "Hm.", (Call("f", {"a": 1}),)),
    ),
    (
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        Message("", "A\nB", (Call("f", {}),)),
    ),
    (
        "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.<|return|>",
        Message("One.\nTwo."),
    ),
    ("<|channel|>analysis to=python code<|message|>print()<|call|>", Message("", "print()")),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", Message(calls=(Call("f", {}),))),
    ("no channel at all", Message("no channel at all")),
    ("<|channel|>anal", Message()),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_harmony(text: str, expected: Message) -> None:
    message = read_everywhere(lambda: parser_of("openai"), text)
    assert message.parsed() == expected
    assert message.has_calls == bool(expected.calls)


def test_harmony_has_no_calls_for_a_request_without_tools() -> None:
    """Nor with the tool choice `none`: the arguments are text."""
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    output_format = MessageFormat(ParserChoice("openai_gptoss", "openai"), tools=None)
    message = read_everywhere(output_format.parser, text)
    assert message == RawMessage('Let me see.\n{"a": 1}', "Hm.", (), False)


@given(st.text("ab </think>\n"), st.text("ab <think>\n"), st.lists(st.integers(0, 60), max_size=4))
def test_reasoning_and_answer_come_out_as_they_went_in(reasoning: str, answer: str, cuts: list[int]) -> None:
    if "</think>" in reasoning:
        return
    text = f"<think>\n{reasoning}\n</think>\n\n{answer}"
    message = read(parser_of(None, reasoning="qwen3"), text, [min(cut, len(text)) for cut in cuts])
    assert (message.reasoning, message.content) == (reasoning.strip(), answer.lstrip("\n"))


def test_where_the_reasoning_is() -> None:
    for cuts in ([], range(1, 30)):
        parser = parser_of(None, reasoning="qwen3")
        text = "<think>\nWell.\n</think>\n\nYes."
        read(parser, text, list(cuts))
        (span,) = parser.reasoning_spans
        assert text[span.begin : span.end] == "Well.\n"
        assert text[span.end : span.after] == "</think>"
    parser = parser_of("openai")
    text = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
    read(parser, text)
    assert [text[span.begin : span.end] for span in parser.reasoning_spans] == ["A", "B"]


@pytest.mark.parametrize(
    ("family", "prompt", "is_open"),
    [
        ("qwen3", "user: <think> is what?\nassistant: ", False),
        ("qwen3", "assistant: <think>\n", True),
        ("qwen3", "assistant: <think>\n\n</think>\n\n", False),
        ("deepseek_r1", "assistant: ", True),
        ("deepseek_r1", "assistant: </think>", False),
    ],
)
def test_a_prompt_may_end_inside_reasoning(family: str, prompt: str, is_open: bool) -> None:
    assert ParserChoice(family).reasoning_is_open(prompt) == is_open


@pytest.mark.parametrize(("content", "is_open"), [("<think>well", True), ("<think>a</think>b", False), ("b", False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_continued_message_may_end_inside_reasoning(family: str, content: str, is_open: bool) -> None:
    begin, end = FAMILIES[family].begins[0], FAMILIES[family].ends[0]
    content = content.replace("<think>", begin).replace("</think>", end)
    assert ParserChoice(family).reasoning_is_open("prompt" + content, content) == is_open


def test_a_model_without_reasoning_has_none_open() -> None:
    assert not ParserChoice().reasoning_is_open("<think>")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tool_parser": "hermesx"}, "--tool-call-parser hermesx is unknown; there are: auto, none, deepseek_v3"),
        ({"reasoning_parser": "x"}, "--reasoning-parser x is unknown; there are: auto, none, deepseek_r1"),
    ],
)
def test_unknown_parsers_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParserChoice.make("", make_tokenizer(), **{"tool_parser": "auto", "reasoning_parser": "auto"} | settings)

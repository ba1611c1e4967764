"""Tests of the parsers of tool calls: whatever the cuts, each format gives the calls that it was written from."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text import tool_parsers
from shared.text.deltas import CallArguments
from shared.text.message_parser import TOOL_PARSERS
from shared.text.stream_parser import TrailingSpace
from shared.text.text_reader import TextReader
from shared.text.tool_parsers.argument_types import convert, types_of
from shared.text.tool_parsers.qwen3_coder import Qwen3CoderParser
from tests.text.tool_outputs import (
    TEXT_FORMATS,
    TYPED_FORMATS,
    WRITERS,
    Call,
    Message,
    RawMessage,
    joined,
    parser_of,
    read,
    read_everywhere,
)

WEATHER = Call("get_weather", {"city": "Paris", "days": 3})
TIME = Call("get-time.now", {})

SAMPLES: list[tuple[str, str, Message]] = [
    # the forms that the families document, and the liberties that models take with them
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        Message(calls=(WEATHER,)),
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}</tool_call>',
        Message(calls=(WEATHER,)),
    ),
    (
        "hermes",
        '<tool_call>{"name": "get-time.now", "arguments": "{}"}</tool_call> Done.',
        Message("Done.", calls=(TIME,)),
    ),
    ("hermes", "It is a <tool_call> tag, <tool_call", Message("It is a <tool_call> tag, <tool_call")),
    ("hermes", "See <tool_call>\n[1, 2]</tool_call>", Message("See <tool_call>\n[1, 2]</tool_call>")),
    (
        "hermes",
        '<tool_call>\n{"name": "get-time.now", "arguments": {}}}\n</tool_call>\n'
        '<tool_call>\n[{"name": "get-time.now", "arguments": {}}}, {"name": "get-time.now"}]]\n</tool_call> Done.',
        Message("Done.", calls=(TIME, TIME, TIME)),
    ),
    (
        "hermes",
        '<tool_call>\n[{"name": "get-time.now", "arguments": {}}, {"note": 1}]\n</tool_call>',
        Message('{"note": 1}', calls=(TIME,)),
    ),
    ("granite", '<|tool_call|>[{"name": "get-time.now", "arguments": {}}}]', Message(calls=(TIME,))),
    (
        "granite",
        '<|tool_call|> [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        Message(calls=(WEATHER,)),
    ),
    ("granite", '<tool_call>[{"name": "get-time.now", "arguments": {}}]', Message(calls=(TIME,))),
    ("phi4_mini_json", 'functools[{"name": "get-time.now", "arguments": {}}]', Message(calls=(TIME,))),
    ("phi4_mini_json", '<|tool_call|>{"name": "get-time.now", "arguments": {}}<|/tool_call|>', Message(calls=(TIME,))),
    (
        "phi4_mini_json",
        '<|tool_call|>[{"name": "get-time.now", "arguments": {}}]<|/tool_call|>',
        Message(calls=(TIME,)),
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, "id": "abcdefghi"}]',
        Message(calls=(WEATHER,)),
    ),
    (
        "mistral",
        'Yes.[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}[TOOL_CALLS]get-time.now{}',
        Message("Yes.", calls=(WEATHER, TIME)),
    ),
    ("mistral", "[TOOL_CALLS]get-time.now[CALL_ID]a1B2c3D4e[ARGS]{}", Message(calls=(TIME,))),
    ("mistral", '[TOOL_CALLS][{"name": "get-time.now", "arguments": {}}}]', Message(calls=(TIME,))),
    ("mistral", "[TOOL_CALLS]get-time.now{}}", Message(calls=(TIME,))),
    ("mistral", "[TOOL_CALLS][TOOL_CALLS]get-time.now{}", Message(calls=(TIME,))),
    ("mistral", "[TOOL_CALLS] [TOOL_CALLS] a", Message("[TOOL_CALLS] [TOOL_CALLS] a")),
    ("mistral", "[TOOL_CALLS] are what?", Message("[TOOL_CALLS] are what?")),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', Message(calls=(WEATHER,))),
    ("llama3_json", '{"type": "function", "name": "get-time.now", "parameters": {}}', Message(calls=(TIME,))),
    ("llama3_json", '<|python_tag|>{"name": "get-time.now", "parameters": {}}', Message(calls=(TIME,))),
    ("llama3_json", 'Now:\n{"name": "get-time.now", "parameters": {}}', Message("Now:", calls=(TIME,))),
    ("llama3_json", '{"name": "Ann", "parameters": {}}', Message('{"name": "Ann", "parameters": {}}')),
    ("llama3_json", '{"temperature": 3}', Message('{"temperature": 3}')),
    (
        "llama3_json",
        '{"name": "get_weather", "age": 3, "parameters": {}} is 3.',
        Message('{"name": "get_weather", "age": 3, "parameters": {}} is 3.'),
    ),
    ("llama3_json", '{"name": "get_weather" is mine}', Message('{"name": "get_weather" is mine}')),
    ("llama3_json", '{"name": "get-time.now", "parameters": {}}\n[1]', Message("[1]", calls=(TIME,))),
    (
        "llama3_json",
        '{"name": "get-time.now", "parameters": {}}\n{"name": "get_weather", "age": 3}',
        Message('{"name": "get_weather", "age": 3}', calls=(TIME,)),
    ),
    ("llama3_json", 'It is {"name": "get-time.now"}', Message('It is {"name": "get-time.now"}')),
    ("pythonic", "[get_weather(city='Paris', days=3), get-time.now()]", Message(calls=(WEATHER, TIME))),
    (
        "pythonic",
        '[get_weather(city="it\'s \\"\\d\\"", exact=true, any=None)]',
        Message(calls=(Call("get_weather", {"city": 'it\'s "\\d"', "exact": True, "any": None}),)),
    ),
    ("pythonic", "[1, 2] and [get_weather(city='x')]", Message("[1, 2] and [get_weather(city='x')]")),
    ("pythonic", "[other(city='x')]", Message("[other(city='x')]")),
    ("llama4_pythonic", "<|python_start|>[get-time.now()]<|python_end|>", Message(calls=(TIME,))),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get-time.now<｜tool▁sep｜>{}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Message(calls=(TIME,)),
    ),
    (
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time.now\n```json\n{}}\n```<｜tool▁call▁end｜>",
        Message(calls=(TIME,)),
    ),
    (
        "kimi_k2",
        "<|tool_call_begin|>get-time.now<|tool_call_argument_begin|>{}}<|tool_call_end|>",
        Message(calls=(TIME,)),
    ),
    (
        "kimi_k2",
        '<|tool_call_begin|>get_weather<|tool_call_argument_begin|>{"city": "Paris", "days": 3}<|tool_call_end|>',
        Message(calls=(WEATHER,)),
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        Message(calls=(WEATHER,)),
    ),
    ("glm47", "<tool_call>get-time.now</tool_call>", Message(calls=(TIME,))),
    (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        Message(calls=(WEATHER,)),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\nthree\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n"
        "<parameter=items>\n[1, 'a']\n</parameter>\n</function>\n</tool_call>",
        Message(calls=(Call("get_weather", {"days": "three", "exact": True, "items": [1, "a"]}),)),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n</tool_call>",
        Message(calls=(WEATHER,)),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n<parameter=city>\nParis\n</function>\n</tool_call>",
        Message(calls=(WEATHER,)),
    ),
    (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nsay <parameter=x> or </function>\n</parameter>\n</function>",
        Message(calls=(Call("get_weather", {"city": "say <parameter=x> or </function>"}),)),
    ),
    ("openai", " to=functions.get-time.now<|channel|>commentary json<|message|>{}<|call|>", Message(calls=(TIME,))),
]


@pytest.mark.parametrize(("family", "text", "expected"), SAMPLES)
def test_documented_outputs(family: str, text: str, expected: Message) -> None:
    """TOL-06: the same whatever the cuts, markers that turn out to be text included."""
    message = read_everywhere(lambda: parser_of(family), text)
    assert message.parsed() == expected
    assert message.has_calls == bool(expected.calls)


def test_every_family_has_a_writer() -> None:
    assert set(WRITERS) == set(TOOL_PARSERS)


@pytest.mark.parametrize("family", WRITERS)
def test_text_before_and_calls(family: str) -> None:
    """TOL-01, TOL-04: several calls, and text before them."""
    calls = (WEATHER, TIME, Call("get_weather", {"city": 'a "b" {c}\\\n', "options": {"x": [1, None, {"y": "é𝄞"}]}}))
    text = "<|channel|>commentary<|message|>Let me see.<|end|>" if family == "openai" else "Let me see."
    message = read_everywhere(lambda: parser_of(family), text + WRITERS[family](calls))
    assert message.parsed() == Message("Let me see.", calls=calls)
    assert message.has_calls


VALUES: list[Any] = [7, True, None, {"a": [1, {"b": None}], "c": {}}, 'say "hi" \\ {}']


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_every_set_of_cuts(value: Any) -> None:
    """TOL-01."""
    text = '<tool_call>\n{"name":"f","arguments":{"id":' + json.dumps(value) + "}}\n</tool_call>"
    whole = read(parser_of("hermes"), text)
    assert whole == RawMessage("", "", (("f", '{"id":' + json.dumps(value) + "}"),), True)
    for count in (1, 2, 3) if value == 7 else (1, 2):
        for cuts in itertools.combinations(range(1, len(text)), count):
            assert read(parser_of("hermes"), text, cuts) == whole, cuts


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=6,
)
json_arguments = st.dictionaries(st.text(), json_values, max_size=4)
typed_arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": st.text(),
        "days": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "exact": st.booleans(),
        "items": st.lists(json_values, max_size=3),
        "options": st.dictionaries(st.text(), json_values, max_size=3),
    },
)


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, str, tuple[Call, ...], list[int]]:
    """Draw a family, an output of it, its calls, and where it is cut."""
    family = draw(st.sampled_from(sorted(WRITERS)))
    arguments = typed_arguments if family in TYPED_FORMATS else json_arguments
    if family in TEXT_FORMATS:
        arguments = arguments.filter(lambda value: "</" not in json.dumps(value, ensure_ascii=False))
    calls = tuple(draw(st.lists(st.builds(Call, st.just("get_weather"), arguments), min_size=1, max_size=3)))
    text = WRITERS[family](calls)
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=6))
    return family, text, calls, cuts


@given(outputs())
def test_any_arguments_and_any_cuts(output: tuple[str, str, tuple[Call, ...], list[int]]) -> None:
    """TOL-01, TOL-10: unicode, escapes, nesting, brackets and markers in strings."""
    family, text, calls, cuts = output
    message = read(parser_of(family), text, cuts)
    assert message.parsed() == Message(calls=calls)
    assert message.has_calls


PIECES = [
    "<tool_call>", "</tool_call>", "<function=", "get_weather", ">", "<parameter=city>", "</parameter>", "{", "}", '"',
    '"name":', '"get_weather"', '"arguments":', "[TOOL_CALLS]", "[", "]", "(", ")", "city=", "'", "\\", ",", "a", "1",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "```json",
    "<|channel|>", "<|message|>", "to=functions.f", "<|end|>", "<arg_key>", "</arg_key>", "<arg_value>", "functools[",
    "<think>", "</think>", "<|tool_call|>", "\\ud83d", "\\ude00",
]  # fmt: skip
pieces = st.sampled_from([*PIECES, " ", "\n"])


@given(st.sampled_from(sorted(WRITERS)), st.lists(pieces, max_size=12), st.lists(st.integers(0, 120), max_size=5))
def test_any_text_is_read_the_same_however_it_is_cut(family: str, parts: list[str], cuts: list[int]) -> None:
    """TOL-06: by every parser."""
    text = "".join(parts)
    whole = read(parser_of(family, reasoning="qwen3"), text)
    assert read(parser_of(family, reasoning="qwen3"), text, [min(cut, len(text)) for cut in cuts]) == whole
    json.dumps(whole, ensure_ascii=False).encode()  # no halves of surrogate pairs, which could not be sent
    for _, arguments in whole.calls if whole.has_calls else ():
        assert isinstance(json.loads(arguments), (dict, list))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"cmd": "mkdir x/{a,b"}', {"cmd": "mkdir x/{a,b"}),
        ('{"s": "}}</tool_call>"}', {"s": "}}</tool_call>"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("{}", {}),
        ("null", {}),
        ('""', {}),
    ],
)
def test_arguments_as_models_write_them(arguments: str, expected: Any) -> None:
    """TOL-02, TOL-10."""
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    message = read_everywhere(lambda: parser_of("hermes"), text)
    assert message.parsed() == Message(calls=(Call("f", expected),))


@pytest.mark.parametrize("arguments", ["[1, 2]", "5"])
def test_arguments_that_are_no_object_are_passed_on(arguments: str) -> None:
    """TOL-10: the client checks them."""
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    message = read_everywhere(lambda: parser_of("hermes"), text)
    assert message == RawMessage("", "", (("f", arguments),), True)


def test_missing_arguments_are_none() -> None:
    """TOL-02."""
    message = read_everywhere(lambda: parser_of("hermes"), '<tool_call>{"name": "f"}</tool_call>')
    assert message == RawMessage("", "", (("f", "{}"),), True)


@pytest.mark.parametrize("separator", ["; ", ";", "\n", ";\n", "", ", "])
@pytest.mark.parametrize("count", [2, 3])
def test_json_calls_with_any_separator(separator: str, count: int) -> None:
    """TOL-04."""
    call = '{"name": "get_weather", "parameters": {"city": "x"}}'
    message = read_everywhere(lambda: parser_of("llama3_json"), separator.join([call] * count))
    assert message.parsed() == Message(calls=(Call("get_weather", {"city": "x"}),) * count)


@pytest.mark.parametrize("family", WRITERS)
def test_what_came_of_a_call_that_was_cut_off(family: str) -> None:
    """TOL-10: the arguments so far are a beginning of them all, and the call does not count as complete."""
    text = WRITERS[family]([Call("get_weather", {"city": "Paris and London", "options": {"a": [1, 2]}})])
    whole = read(parser_of(family), text).calls[0][1]
    begun = 0
    for length in range(len(text)):
        message = read(parser_of(family), text[:length])
        if message.calls:
            begun += 1
            (name, arguments), *others = message.calls
            assert (name, others, message.content) == ("get_weather", [], "")
            assert whole.startswith(arguments)
            assert message.has_calls <= (arguments == whole)
    assert begun > 10


@pytest.mark.parametrize(
    "arguments", ['{"a": <b></tool_call>', '{"a": "b</tool_call>', "{]", "{", '{"a": [1, 2}</tool_call>']
)
def test_broken_arguments_are_passed_on(arguments: str) -> None:
    """TOL-10: no error, nothing in the content, and the call does not count as complete."""
    message = read_everywhere(lambda: parser_of("hermes"), f'<tool_call>{{"name": "f", "arguments": {arguments}')
    assert message.content == ""
    assert message.calls[0][0] == "f"


def test_text_behind_broken_arguments_is_content() -> None:
    """The call has ended with its marker, so that nothing behind that belongs to it."""
    text = '<tool_call>{"name": "f", "arguments": {"a": <b>}}</tool_call>\n"Hm": it broke.'
    message = read_everywhere(lambda: parser_of("hermes"), text)
    assert message == RawMessage('"Hm": it broke.', "", (("f", '{"a": <b>}}'),), False)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {<}</tool_call>\n'
            '<tool_call>[{"name": "g", "arguments": {}}, {"name": "h", "arguments": {}}]</tool_call>',
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{<}<|tool_call_end|>"
            "<|tool_call_begin|>g:1<|tool_call_argument_begin|>{}\n<|tool_call_end|>"
            "<|tool_call_begin|>h:2<|tool_call_argument_begin|>{}}<|tool_call_end|>",
        ),
    ],
)
def test_calls_behind_a_broken_one(family: str, text: str) -> None:
    """They are read as any, to their end markers."""
    message = read_everywhere(lambda: parser_of(family), text)
    assert [name for name, _ in message.calls] == ["f", "g", "h"]
    assert (message.content, message.has_calls) == ("", False)


def test_only_the_first_call_is_kept_if_calls_are_not_to_be_parallel() -> None:
    text = WRITERS["hermes"]([WEATHER, TIME]) + "\nDone."
    message = read_everywhere(lambda: parser_of("hermes", parallel=False), text)
    assert message.parsed() == Message("Done.", calls=(WEATHER,))
    assert message.has_calls


@pytest.mark.parametrize("family", tool_parsers.FAMILIES)
def test_markers_that_are_special_tokens_never_are_content(family: str) -> None:
    markers = [marker for marker in tool_parsers.FAMILIES[family].markers() if len(marker) > 1]
    for marker in markers:
        text = f"a {marker} b"
        message = read_everywhere(lambda: parser_of(family, **dict.fromkeys(markers, 1)), text)
        assert (message.content.replace(" ", ""), message.calls) == ("ab", ())


def test_ids_are_the_familys() -> None:
    def ids(family: str, text: str) -> list[str]:
        parser = parser_of(family)
        return [delta.id for delta in parser.feed(text) + parser.finish() if hasattr(delta, "id")]

    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}") == ["a1B2c3D4e"]
    (made,) = ids("mistral", "[TOOL_CALLS]f{}")
    assert len(made) == 9
    assert made.isalnum()
    assert ids("kimi_k2", WRITERS["kimi_k2"]([WEATHER, TIME])) == [
        "functions.get_weather:0",
        "functions.get-time.now:1",
    ]
    (made,) = ids("hermes", WRITERS["hermes"]([TIME]))
    assert made.startswith("call_")
    assert made != ids("hermes", WRITERS["hermes"]([TIME]))[0]


def test_a_string_argument_is_passed_on_as_it_comes() -> None:
    """Clients see long arguments grow, in JSON and in XML."""
    for family, begin in (
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "'),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\n"),
    ):
        parser = parser_of(family)
        parser.feed(begin)
        assert [delta.text for delta in parser.feed("Par") if hasattr(delta, "text")] == ["Par"]


@pytest.mark.parametrize(
    "part",
    [
        "<tool_call>", "<function=", "<function=f><parameter=a>", '{"arguments": [\n', "[get_weather(", "[TOOL_CALLS]",
        "<｜tool▁call▁begin｜>", "<|tool_call_begin|>f:0", '<tool_call>{"arguments": "', "<|channel|>", "<think>", "[",
        "{", "\n", '[TOOL_CALLS][{"x": [',
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", [*WRITERS, None])
def test_no_output_keeps_a_parser_busy(family: str | None, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that repeats itself must not hold up other streams: the work grows with the text, not with its square."""
    work = {}
    for length in (4096, 32_768):
        looked_at = 0

        def unread(reader: TextReader) -> str:
            nonlocal looked_at
            text = reader._text[reader.position - reader._start :]
            looked_at += len(text) + 1
            return text

        monkeypatch.setattr(TextReader, "unread", property(unread))
        read(parser_of(family, reasoning="qwen3", is_open=family is None), (part * length)[:length])
        work[length] = looked_at
    assert work[32_768] < 20 * work[4096]


@pytest.mark.parametrize(
    ("family", "begin"),
    [
        ("hermes", '<tool_call>{"x": "'),
        ("hermes", '<tool_call>{"arguments": "'),
        ("hermes", '<tool_call>{"'),
        ("llama3_json", '{"name": "get_weather", "id": "'),
        ("qwen3_coder", "<function="),
        ("qwen3_coder", "<function=f><parameter=a>"),
        ("glm45", "<tool_call>f<arg_key>"),
        ("pythonic", "[get_weather(city="),
        ("pythonic", "[get_weather(city='"),
        ("kimi_k2", "<|tool_call_begin|>"),
        ("openai", "<|channel|>"),
    ],
)
def test_a_piece_is_not_added_to_all_text_before_it(family: str, begin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that has to be kept until it is decided is not copied with each piece."""
    num_copied = 0
    add = TextReader.add

    def counting_add(reader: TextReader, piece: str) -> None:
        nonlocal num_copied
        add(reader, piece)
        num_copied += len(reader._text)

    monkeypatch.setattr(TextReader, "add", counting_add)
    text = begin + "a" * 4000
    read(parser_of(family), text, range(1, len(text)))
    assert num_copied < 20 * len(text)


@pytest.mark.parametrize(
    ("family", "begin"),
    [
        ("qwen3_coder", "<function="),
        ("mistral", "[TOOL_CALLS]"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>"),
        ("glm45", "<tool_call>"),
        ("pythonic", "["),
    ],
)
def test_no_name_is_longer_than_a_tools(family: str, begin: str) -> None:
    """A longer one is shown as text at once, not held back to its end."""
    parser = parser_of(family)
    text = begin + "a" * 65
    assert joined(parser.feed(text), parser.has_calls) == RawMessage(text, "", (), False)


def test_white_space_that_is_held_back() -> None:
    """It is shown once, before the text that follows it, and copied once."""
    space = TrailingSpace()
    assert [space.push(text) for text in ("a ", " ", "\n", "b\n")] == ["a", "", "", "  \nb"]
    assert space.flush() == "\n"
    space.push(" ")
    space.drop()
    assert space.push("c") == "c"


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (
            "hermes",
            '<tool_call>{"name": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>",
            RawMessage('<tool_call>{"name": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>", "", (), False),
        ),
        (
            "pythonic",
            "[get_weather(city='x'" + "-" * 5000 + "1)]",
            RawMessage("", "", (("get_weather", json.dumps({"city": "'x'" + "-" * 5000 + "1"})),), True),
        ),
    ],
)
def test_deep_nesting_is_text(family: str, text: str, expected: RawMessage) -> None:
    """A parser that raised would end the request."""
    assert read(parser_of(family), text) == expected


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "\\ud83d\\ude00\\ud83d", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>'),
        ("pythonic", '[get_weather(city="\\ud83d\\ude00\\ud83d")]'),
        ("glm45", '<tool_call>get_weather<arg_key>any</arg_key><arg_value>["\\ud83d"]</arg_value></tool_call>'),
    ],
)
def test_surrogates_in_escapes(family: str, text: str) -> None:
    """An answer with half of a pair could not be encoded."""
    message = read_everywhere(lambda: parser_of(family), text)
    shown = json.dumps(message, ensure_ascii=False)
    assert "\ufffd" in shown
    assert family == "glm45" or "😀" in shown
    shown.encode()


schemas = st.dictionaries(
    st.sampled_from(["type", "anyOf", "oneOf", "enum", "const", "properties", "$ref"]),
    st.recursive(
        st.sampled_from(["string", "integer", "object", None, 1, True]),
        lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(["type", "anyOf"]), values),
        max_leaves=6,
    ),
)


@given(
    st.dictionaries(st.just("properties"), st.dictionaries(st.just("city"), schemas) | st.integers()),
    st.text(max_size=8),
)
def test_any_schema_and_any_text_give_json(parameters: dict[str, Any], text: str) -> None:
    """A tool's schema is the client's, and may be anything."""
    parser = Qwen3CoderParser({"f": parameters})
    output = f"<function=f>\n<parameter=city>\n{text}\n</parameter>\n</function>"
    pieces = [delta.text for delta in parser.feed(output) + parser.finish() if isinstance(delta, CallArguments)]
    value = json.loads("".join(pieces), parse_constant=pytest.fail)["city"]
    assert value == text or not isinstance(value, str) or json.loads(text) == value


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, "[1, 'a', None]", [1, "a", None]),
        ({"type": "array"}, "[NaN]", "[NaN]"),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five", "five"),
        ({"enum": ["a", "b"]}, "a", "a"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, "5", 5),
        ({}, "five", "five"),
    ],
)
def test_an_argument_gets_the_type_of_its_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    result = convert(text, types_of(schema))
    assert (result, type(result)) == (value, type(value))

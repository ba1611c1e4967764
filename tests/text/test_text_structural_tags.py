"""Tests structural tags: what each format allows, where free text ends, tokens of their own, and what is refused."""

from typing import Any

import pytest
from tokenizers import AddedToken

from shared.errors import InvalidRequest
from shared.structured_outputs import StructuredOutputsParams
from shared.text.grammars import GrammarCompiler
from shared.text.structural_tags import MAX_DEPTH, MAX_FORMATS, structural_tag_grammar
from shared.text.tokenizer import Tokenizer
from tests.text.vocabulary import make_backend

BACKEND = make_backend()
BACKEND.add_tokens([AddedToken("<call>", normalized=False), AddedToken("</call>", normalized=False)])
COMPILER = GrammarCompiler(Tokenizer(BACKEND, eos_token_ids=BACKEND.encode("</s>").ids))


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(type: str, *elements: Any) -> dict[str, Any]:
    return {"type": type, "elements": list(elements)}


ANY: dict[str, Any] = {"type": "any_text"}
SUM = {"type": "json_schema", "json_schema": {"type": "object", "required": ["sum"]}}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
DIGITS = {"type": "regex", "pattern": "[0-9]+"}
THOUGHT = tag("<think>", ANY, "</think>")
ONE, TWO = tag("<f=one>", NUMBER, "</f>"), tag("<f=two>", SUM, "</f>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [ONE, TWO]}
SEPARATED = {"type": "tags_with_separator", "tags": [ONE, TWO], "separator": ", "}


def matches(format: Any, text: str) -> bool:
    """Return whether an output may be `text` and end there."""
    params = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": format})
    matcher, ids = COMPILER.matcher(COMPILER.compile(params)), BACKEND.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        (const('say "x"\n/'), ['say "x"\n/'], ["", "say"]),
        (SUM, ['{"sum": 3}', '{"sum":3}'], ["{}", "[1]"]),
        ({"type": "json_schema", "json_schema": True}, ["[null]"], ["x"]),
        (DIGITS, ["12"], ["", "x"]),
        ({"type": "regex", "pattern": "a/b"}, ["a/b"], ["ab"]),
        ({"type": "grammar", "grammar": 'root ::= "a" b\nb ::= [0-9]'}, ["a1"], ["a"]),
        ({"type": "grammar", "grammar": 'start: "a" B\nB: /[0-9]/'}, ["a1"], ["a"]),
        (ANY, ["", "one <f=one>\n"], []),
        ({"type": "any_text", "excludes": ["ab", "<"]}, ["", "a b\n"], ["cab", "<"]),
        ({"type": "any_text", "max_chars": 3}, ["", "é\nx"], ["four"]),
        (of("sequence", const("a"), DIGITS, const("b")), ["a1b"], ["ab", "a1"]),
        (of("or", const("a"), DIGITS), ["a", "12"], ["", "a1"]),
        ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
        ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
        ({"type": "repeat", "content": const("a"), "min": 1, "max": 2}, ["a", "aa"], ["", "aaa"]),
        ({"type": "repeat", "content": const("a"), "min": 2, "max": -1}, ["aa", "aaaa"], ["a"]),
        (tag("<a>", NUMBER, ["</a>", "</b>"]), ["<a>1</a>", "<a>1</b>"], ["<a>1", "1"]),
        (tag("<a>", NUMBER, ""), ["<a>1"], ["<a>"]),
        (tag("", ANY, ["", "x"]), ["", "a b"], []),
        (THOUGHT, ["<think>Is <b> it?\n</think>"], ["<think>", "<think>a</think>b", "<think>a</think>b</think>"]),
        (tag("<a>", ANY, ["</a>", "</b>"]), ["<a>1</a>", "<a>1</b>"], ["<a>1</b>2</a>"]),
        (tag("<a>", {"type": "any_text", "excludes": ["z"]}, "</a>"), ["<a>b</a>"], ["<a>z</a>"]),
        (of("sequence", ANY, const("END"), DIGITS), ["END1", "a b END1"], ["a", "END", "END1END1"]),
        (of("sequence", THOUGHT, const("\n"), SUM), ['<think>{</think>\n{"sum": 1}'], ['{"sum": 1}']),
        (tag("<a>", of("sequence", DIGITS, ANY), "</a>"), ["<a>1 x</a>"], ["<a>x</a>", "<a>1</a>2</a>"]),
        (tag("<a>", of("sequence", ANY, const("=")), "</a>"), ["<a>x=</a>"], ["<a>x</a>"]),
        (TRIGGERED, ["", "no <g>", 'a <f=one>1</f> b <f=two>{"sum": 1}</f>'], ["<f=", "<f=one>x</f>", "<f=six>1</f>"]),
        (
            TRIGGERED | {"at_least_one": True},
            ["<f=one>1</f>", "<f=one>1</f> b<f=one>2</f>"],
            ["", "a", "a <f=one>1</f>"],
        ),
        (
            TRIGGERED | {"stop_after_first": True},
            ["", "a", "a <f=one>1</f>"],
            ["<f=one>1</f> b", "<f=one>1</f><f=one>1</f>"],
        ),
        (TRIGGERED | {"at_least_one": True, "stop_after_first": True}, ["<f=one>1</f>"], ["", "a", "<f=one>1</f>b"]),
        (TRIGGERED | {"excludes": ["z"]}, ["a", "a <f=one>1</f> b"], ["z", "z<f=one>1</f>", "<f=one>1</f>z"]),
        (
            tag("<a>", TRIGGERED, "</a>"),
            ["<a></a>", "<a>x</a>", "<a>x <f=one>1</f> y</a>"],
            ["<a>x", "<a>x</a>y", "<a>x</a><f=one>1</f></a>"],
        ),
        (
            tag("<a>", TRIGGERED | {"stop_after_first": True}, "</a>"),
            ["<a>x</a>", "<a>x <f=one>1</f></a>"],
            ["<a>x <f=one>1</f> y</a>"],
        ),
        (of("sequence", TRIGGERED, const("END")), ["a <f=one>1</f> END"], ["a <f=one>1</f>", "ENDb"]),
        (
            SEPARATED,
            ["", "<f=one>1</f>", "<f=one>1</f>, <f=one>2</f>"],
            ["a", "<f=one>1</f>,", "<f=one>1</f><f=one>2</f>"],
        ),
        (SEPARATED | {"at_least_one": True}, ["<f=one>1</f>"], [""]),
        (SEPARATED | {"stop_after_first": True}, ["", "<f=one>1</f>"], ["<f=one>1</f>, <f=one>2</f>"]),
        (SEPARATED | {"separator": ""}, ["<f=one>1</f><f=one>2</f>"], ["<f=one>1</f>, <f=one>2</f>"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_a_format_allows(format: Any, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not matches(format, text)] == []
    assert [text for text in wrong if matches(format, text)] == []


@pytest.mark.parametrize(
    "format",
    [
        tag("<call>", NUMBER, "</call>"),
        of("sequence", const("<call>"), NUMBER, const("</call>")),
        {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag("<call>", NUMBER, "</call>")]},
        tag("<call>", of("or", ANY, NUMBER), "</call>"),
    ],
    ids=str,
)
def test_what_is_a_token_of_the_model_is_written_as_that(format: Any) -> None:
    """Its text would be many tokens, which the model was not taught."""
    assert BACKEND.encode("<call>1</call>").tokens == ["<call>", "1", "</call>"]
    assert matches(format, "<call>1</call>")
    assert not matches(format, "<call>x</call>") or format["content"] == of("or", ANY, NUMBER)


def test_free_text_ends_at_a_token_of_its_own() -> None:
    assert matches(tag("<call>", ANY, "</call>"), "<call>one two</call>")
    assert not matches(tag("<call>", ANY, "</call>"), "<call>one</call>two</call>")


def test_the_older_form_is_triggered_tags() -> None:
    structures = [{"begin": "<f=one>", "schema": '{"type": "integer"}', "end": "</f>"}]
    older = {"structures": structures, "triggers": ["<f="]}
    newer = {"format": TRIGGERED | {"tags": [ONE]}}
    one, other = (COMPILER.compile(StructuredOutputsParams(structural_tag=value)) for value in (older, newer))
    assert one == other


@pytest.mark.parametrize("at_least_one", [False, True])
def test_a_tag_within_others_is_written_once(at_least_one: bool) -> None:
    """Otherwise time and length would double at each level."""
    format: Any = DIGITS
    for _ in range(MAX_DEPTH // 2 - 1):
        tags = [tag("<f>", format, "</f>")]
        format = {"type": "triggered_tags", "triggers": ["<f>"], "tags": tags, "at_least_one": at_least_one}
    assert len(structural_tag_grammar({"format": format}, "", {})) < 10_000
    depth = MAX_DEPTH // 2 - 1
    assert matches(format, f"{'<f>' * depth}12{'</f>' * depth}")
    assert not matches(format, f"{'<f>' * depth}x{'</f>' * depth}")


def nested(depth: int) -> dict[str, Any]:
    return const("a") if depth == 1 else {"type": "star", "content": nested(depth - 1)}


def nested_schema(depth: int) -> dict[str, Any]:
    return {} if depth == 1 else {"not": nested_schema(depth - 1)}


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ({"type": "dispatch", "rules": []}, "dispatch"),
        ({"type": "token", "token": 3}, "token"),
        ({"type": "any_tokens"}, "any_tokens"),
        (ANY | {"max_tokens": 3}, "max_tokens"),
        (SUM | {"style": "qwen_xml"}, "style"),
        (SUM | {"any_order": True}, "any_order"),
        ({"type": "json_schema", "json_schema": {"type": "strng"}}, "strng"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": nested_schema(600)}, "nested too deeply"),
        ({"type": "regex", "pattern": "["}, "unclosed"),
        ({"type": "grammar", "grammar": "root ::= nothing"}, "nothing"),
        (const(""), "length >= 1"),
        (of("sequence"), "length >= 1"),
        (of("sequence", ANY, DIGITS), "must be the last"),
        (of("sequence", TRIGGERED, tag("", NUMBER, "")), "must be the last"),
        (tag("<a>", ANY, []), "length >= 1"),
        (tag("<a>", 3, "x"), "format.content"),
        ({"type": "tag", "begin": {"type": "token", "token": 3}, "content": ANY, "end": ""}, "format.begin"),
        (TRIGGERED | {"triggers": ["<g"]}, "no trigger begins"),
        ({"type": "repeat", "content": ANY, "min": 3, "max": 2}, "max of repeat"),
        ({"type": "repeat", "content": ANY, "min": 0, "max": 0}, "max of repeat"),
        (nested(MAX_DEPTH + 1), "within one another"),
        (of("or", *[const("a")] * MAX_FORMATS), "at most"),
        (const("a" * 70_000), "at most"),
        (3, "format"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_named(format: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        COMPILER.compile(StructuredOutputsParams(structural_tag={"format": format}), "some_field")
    assert raised.value.param == "some_field"
    assert words in raised.value.message
    assert len(raised.value.message) < 1000


def test_formats_may_be_nested() -> None:
    assert matches(nested(MAX_DEPTH), "aaa")

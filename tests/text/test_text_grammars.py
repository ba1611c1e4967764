"""Tests grammars: what each kind of demand allows, what is refused and in which words, and the bounds."""

import json
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from shared.errors import InvalidRequest
from shared.structured_outputs import StructuredOutputsParams
from shared.text import grammars
from shared.text.grammars import GrammarCompiler, grammar_text
from shared.text.tokenizer import Tokenizer
from tests.text.vocabulary import KINDS, make_backend, make_tokenizer, make_vocabulary

TOKENIZER = make_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NODE = {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
TAGS = {
    "structures": [{"begin": "<f=one>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}


def follows(text: str, **demand: Any) -> bool:
    """Return whether an output may be `text` and end there."""
    grammar = grammar_text(StructuredOutputsParams(**demand))
    COMPILER.check(grammar, "structured_outputs")
    matcher = COMPILER.matcher(grammar)
    tokens = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def refusal(**demand: Any) -> str:
    with pytest.raises(InvalidRequest) as raised:
        COMPILER.check(grammar_text(StructuredOutputsParams(**demand), "some_field"), "some_field")
    assert raised.value.param in ("some_field", "structured_outputs")
    assert len(raised.value.message) < 1000
    return raised.value.message


@pytest.mark.parametrize(
    ("demand", "text", "wrong"),
    [
        ({"json": PERSON}, '{"name": "Zoë", "age": 41}', '{"name": "Zoë", "age": 151}'),
        ({"json": json.dumps(PERSON)}, '{"name":"","age":0}', '{"name":"","age":0,"x":1}'),
        ({"json": {}}, "[1, null, {}]", "[1, null"),
        ({"json": True}, '"text"', "text"),
        ({"json": NODE}, '{"n": {"n": {}}}', '{"n": 1}'),
        ({"json": {"type": "integer", "maximum": 30_000_000_000}}, "29999999999", "30000000001"),
        ({"json": {"type": "integer", "exclusiveMinimum": 5, "maximum": 7}}, "6", "5"),
        ({"json": {"type": "integer", "minimum": -(2**62)}}, str(-(2**62)), str(-(2**62) - 1)),
        ({"json": {"type": "number", "multipleOf": 0.1}}, "0.3", "0.35"),
        ({"json": {"type": "string", "minLength": 10_000}}, '"' + "a" * 10_000 + '"', '"' + "a" * 9_999 + '"'),
        ({"json": {"type": "array", "items": [{"type": "string"}, {"type": "null"}]}}, '["a", null]', '[null, "a"]'),
        ({"json": {"type": "array", "maxItems": 10**6}}, "[]", "{}"),
        ({"json": {"enum": [f"word {at}" for at in range(5000)]}}, '"word 4999"', '"word 5000"'),
        ({"json": {"type": "object", "properties": {"größe": {"const": 1}}}}, '{"größe": 1}', '{"größe": 2}'),
        ({"json_object": True}, '{"any": ["thing"]}', "[]"),
        ({"regex": r"\d{3}-[a-z]+"}, "123-abc", "123-"),
        ({"choice": ["yes", 'no "way"', "höher"]}, 'no "way"', "no"),
        ({"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]+/'}, "a12", "a"),
        ({"grammar": 'root ::= "x" digits\ndigits ::= [0-9]+\n'}, "x7", "x"),
        ({"grammar": 'start: /(a+)*/ "::="'}, "aa::=", "aa"),
        ({"grammar": 'root ::= ("a"{2}){3}'}, "aaaaaa", "aaaa"),
        ({"grammar": r'root ::= "\u00e9\U0001F600" [\u4e00-\u9fff] "\u0022\\u0041"'}, '\u00e9😀一"\\u0041', "é"),
        ({"grammar": 'root ::= (("ab"+ )\n )* "}" | "x" ("y"?){2}'}, "abab}", "xyyy"),
        ({"grammar": 'root ::= ([0-9]{2} )? "+)*" [*+?})] # ("x"+)?'}, "12+)*}", '12+ "")*}'),
        ({"grammar": 'root ::= r+ "." (r{2})?\nr ::= ([xy]+)? "z"'}, "xyz.zz", "xyz.z"),
        ({"structural_tag": TAGS}, "first <f=one>12</f>", "first <f=one>x</f>"),
        ({"structural_tag": TAGS}, "no tag at all", "<f=two>12</f>"),
    ],
    ids=str,
)
def test_what_a_demand_allows(demand: dict[str, Any], text: str, wrong: str) -> None:
    """GDD-01, GDD-03."""
    assert follows(text, **demand)
    assert not follows(wrong, **demand)


def test_whitespace_between_tokens_is_bounded() -> None:
    """GDD-09: indented JSON is allowed, but not space after space."""
    assert follows('{\n        "name": "x",\n        "age": 1\n}', json=PERSON)
    for blank in " \n":
        assert not follows("{" + blank * 40 + '"name": "x", "age": 1}', json=PERSON)
    assert follows('{"name":"x","age":1}', json=PERSON, disable_any_whitespace=True)
    assert not follows('{"name": "x","age":1}', json=PERSON, disable_any_whitespace=True)
    assert follows('{ "name": "x", "age": 1}', json=PERSON, whitespace_pattern=" ")
    assert not follows('{\n"name": "x", "age": 1}', json=PERSON, whitespace_pattern=" ")


def test_objects_can_be_closed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}, "free": {}}}
    for text in ('{"a": {"c": 1}}', '{"d": 1}'):
        assert follows(text, json=schema)
        assert not follows(text, json=schema, disable_additional_properties=True)
    assert follows('{"a": {"b": 1}, "free": {"c": 1}}', json=schema, disable_additional_properties=True)


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        ({"json": {"type": "strng"}}, "strng"),
        ({"json": {"$ref": "#/nothing"}}, "/nothing"),
        ({"json": {"$ref": "#"}}, "allows no text at all"),
        ({"grammar": "start: a\na: b\nb: a"}, "allows no text at all"),
        ({"grammar": "root ::= root"}, "allows no text at all"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": "{"}, "not JSON"),
        ({"json": {"type": "object", "properties": [1]}}, "properties must be an object"),
        ({"json": {"type": "string", "pattern": "["}}, "unclosed character class"),
        ({"json": {"type": "string", "pattern": "(?<=a)b"}}, "look-around"),
        ({"json": {"not": {"type": "null"}}}, '"not"'),
        ({"json": {"uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "integer", "minimum": -(2**63)}}, str(-(2**63))),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": False}, '"not"'),
        ({"regex": "["}, "unclosed character class"),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "*"}, "repetition operator missing expression"),
        ({"regex": ""}, "not empty"),
        ({"regex": "a" * 300_000}, "at most"),
        ({"choice": []}, "1 to"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"choice": ["a", 1]}, "list of strings"),
        ({"choice": ["a"] * 20_000}, "1 to"),
        ({"choice": ["a" * 7] * 9_999}, "at most 65536 bytes"),
        ({"grammar": "root ::= nothing"}, "nothing"),
        ({"grammar": r'root ::= "\U00110000"'}, "not in range"),
        ({"grammar": "start: OTHER"}, "OTHER"),
        ({"grammar": 'start: "a"{1000000}'}, "items"),
        ({"structural_tag": {}}, "structures and triggers"),
        ({"structural_tag": TAGS | {"triggers": ["<g"]}}, "no trigger begins"),
        ({"structural_tag": TAGS | {"triggers": 1}}, "format.triggers"),
        ({"structural_tag": TAGS | {"structures": []}}, "format.tags"),
        ({"structural_tag": TAGS | {"structures": [{"begin": 1}]}}, "begin, schema and end"),
        ({}, "got none"),
        ({"json_object": False}, "got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json_object": "yes"}, "json_object must be true or false, got 'yes'"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false"),
        ({"json": {}, "whitespace_pattern": 5}, "whitespace_pattern must be a text, got 5"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is for JSON"),
        ({"grammar": "root ::= x\n" + "x ::= y\n" * 2000}, "at most 8192 bytes"),
        ({"grammar": "start: a\n" + "a: b\n" * 600}, "at most 500 rules"),
        ({"json": "[" * 20_000}, "not JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_named(demand: dict[str, Any], words: str) -> None:
    """GDD-01, GDD-02, GDD-03, STR-10."""
    assert words in refusal(**demand)


@pytest.mark.parametrize("regex", ["(a{1,200}){1,200}", "(x+x+)+y", ".{0,5000}z"])
def test_a_regex_bomb_is_no_bomb(regex: str) -> None:
    """DOS-02: expressions are compiled as far as they are used."""
    COMPILER.check(grammar_text(StructuredOutputsParams(regex=regex)), "regex")


def test_a_schema_that_is_too_large_is_refused() -> None:
    """DOS-02, DOS of the interpreter: before anything is built from it."""
    schema = {"type": "object", "properties": {f"property {at}": {"type": "string"} for at in range(3000)}}
    for json_schema in (schema, json.dumps(schema), "[]," * 10**6):
        assert "must have at most 65536 bytes" in refusal(json=json_schema)


LONGEST = 700
"""Links of a chain that the bounds let through."""


@pytest.mark.parametrize(
    "demand",
    [
        {
            "json": {
                "$ref": "#/$defs/0",
                "$defs": {
                    **{f"{at}": {"properties": {"a": {"$ref": f"#/$defs/{at + 1}"}}} for at in range(LONGEST)},
                    f"{LONGEST}": {"type": "null"},
                },
            }
        },
        {
            "json": {
                "$ref": "#/$defs/0",
                "$defs": {
                    **{f"{at}": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{at + 1}"}]} for at in range(LONGEST)},
                    f"{LONGEST}": {"type": "null"},
                },
            }
        },
        {"grammar": "start: A0\n" + "".join(f'A{at}: "b" | A{at + 1} "c"\n' for at in range(490)) + 'A490: "b"\n'},
        {"grammar": "start: a0\n" + "".join(f'a{at}: "b" | a{at + 1}\n' for at in range(490)) + 'a490: "b"\n'},
        {"grammar": "start: " + "(" * 5000 + '"b"' + ")" * 5000},
        {"regex": "(" * 5000 + "b" + ")" * 5000},
        {"json": {"type": "string", "pattern": "(" * 5000 + "b" + ")" * 5000}},
        {"grammar": "root ::= r0\n" + "".join(f'r{at} ::= "b" | r{at + 1}\n' for at in range(300)) + 'r300 ::= "b"\n'},
    ],
    ids=lambda demand: str(demand)[:40],
)
def test_what_is_nested_deeply_ends_no_process(demand: dict[str, Any]) -> None:
    """The library calls itself for each level. What is accepted can be followed too."""
    grammar = None
    try:
        grammar = grammar_text(StructuredOutputsParams(**demand))
        COMPILER.check(grammar, "it")
    except InvalidRequest:
        return
    matcher, masks = COMPILER.matcher(grammar), np.zeros((1, COMPILER.mask_words), np.int32)
    executor = LLExecutor(2)
    for token in TOKENIZER.encode('{"a": bccc'):
        fill_next_token_bitmask_par(executor, [(matcher, 0)], masks)
        if not matcher.consume_token(token):
            break


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_tokenizer_has_grammars(name: str) -> None:
    """Tokens are taken by their bytes. A word of pieces begins by a space, which JSON allows between tokens."""
    vocabulary = make_vocabulary(name)
    compiler = GrammarCompiler(vocabulary.tokenizer)
    matcher = compiler.matcher(grammar_text(StructuredOutputsParams(regex="(.|\n)*")))
    shown = [id for id in vocabulary.shown_ids if id not in vocabulary.tokenizer.backend.get_added_tokens_decoder()]
    texts = {id: vocabulary.tokenizer.bytes.later[id].decode(errors="replace") for id in shown}
    whole = [id for id, text in texts.items() if text and "\ufffd" not in text]
    assert len(whole) >= 3
    assert matcher.try_consume_tokens(whole[:3]) == 3
    assert matcher.consume_token(compiler.eos_token_ids[0])


def test_a_grammar_that_takes_long_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_COMPILE_SECONDS", 0.0)
    for _ in range(2):  # nothing of it is kept
        assert "too complex" in refusal(regex="some other expression")


def test_few_grammars_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_CHECKED", 2)
    compiler = GrammarCompiler(TOKENIZER)
    for name in "abca":
        compiler.compile(StructuredOutputsParams(regex=name))
    assert len(compiler._checked) == 2


def test_data_in_a_schema_is_not_closed() -> None:
    schema = {"const": {"properties": {}}}
    assert follows('{"properties":{}}', json=schema, disable_additional_properties=True, disable_any_whitespace=True)


def test_matchers_are_independent() -> None:
    grammar = grammar_text(StructuredOutputsParams(regex="ab"))
    one, other = COMPILER.matcher(grammar), COMPILER.matcher(grammar)
    assert one.consume_tokens(TOKENIZER.encode("ab"))
    assert one.is_accepting()
    assert not other.is_accepting()
    assert not COMPILER.matcher(grammar).is_accepting()


def test_an_output_that_is_whole_can_only_end() -> None:
    matcher = COMPILER.matcher(grammar_text(StructuredOutputsParams(choice=["a"])))
    matcher.consume_tokens(TOKENIZER.encode("a"))
    mask = np.zeros((1, COMPILER.mask_words), np.int32)
    fill_next_token_bitmask(matcher, mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert allowed == list(COMPILER.eos_token_ids) == list(TOKENIZER.eos_token_ids)


def test_a_model_without_an_end_has_no_grammars() -> None:
    compiler = GrammarCompiler(Tokenizer(make_backend()))
    with pytest.raises(InvalidRequest, match="no token that ends"):
        compiler.check(grammar_text(StructuredOutputsParams(regex="a")), "guided_regex")


@pytest.mark.parametrize(
    ("demand", "text"),
    [
        ({"json": PERSON}, '{"name": "Zoë and a name that is rather long", "age": 41}'),
        ({"json": {"type": "string", "maxLength": 12}}, '"one two 3456"'),
        ({"json": {"type": "string", "format": "email"}}, '"jane.doe12+news@example-mail.co.uk"'),
        ({"json": {"type": "string", "format": "uuid"}}, '"123e4567-e89b-12d3-a456-426614174000"'),
        ({"json": {"type": "string", "pattern": "^[a-z]{3,12}[0-9]?$"}}, '"internation7"'),
        ({"regex": r"[a-zA-Z_][a-zA-Z0-9_]*"}, "some_Name2"),
    ],
    ids=str,
)
def test_slices_change_no_mask(monkeypatch: pytest.MonkeyPatch, demand: dict[str, Any], text: str) -> None:
    grammar = grammar_text(StructuredOutputsParams(**demand))
    monkeypatch.setattr(grammars, "SLICES", [])
    matchers = [COMPILER.matcher(grammar), GrammarCompiler(TOKENIZER).matcher(grammar)]
    words = np.zeros((2, COMPILER.mask_words), np.int32)
    for token in TOKENIZER.encode(text):
        for row, matcher in enumerate(matchers):
            fill_next_token_bitmask(matcher, words, row)
            assert matcher.consume_token(token)
        assert (words[0] == words[1]).all()

"""Tests that annotations of schemas are left out, and only those."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, Json, SecretBytes, create_model

from shared.errors import InvalidRequest
from shared.structured_outputs import StructuredOutputsParams
from shared.text.json_schemas import FORMATS, without_annotations
from shared.text.tool_parsers.call_grammar import CallGrammar
from tests.text.test_text_grammars import COMPILER, TOKENIZER, follows


def compile(schema: Any) -> str:
    return COMPILER.compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_the_formats_that_are_enforced(format: str) -> None:
    schema = {"type": "string", "format": format}
    assert without_annotations(schema) == schema
    assert not follows('"no such thing!"', json=schema)


@pytest.mark.parametrize("format", ["path", "password", "binary", "iri", "my-own"])
def test_another_format_enforces_nothing(format: str) -> None:
    assert follows('"anything!"', json={"type": "string", "format": format})


def test_names_of_any_kind_and_items_that_may_be_equal() -> None:
    """Zod writes the first of every record."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    assert follows('{"a": 1}', json=record)
    assert not follows('{"a": "b"}', json=record)
    assert follows("[1, 1]", json={"type": "array", "uniqueItems": False, "items": {"const": 1}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "array", "uniqueItems": True},
        {"type": "object", "additionalProperties": {"not": {"type": "string"}}},
    ],
)
def test_what_demands_something_is_still_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="not supported"):
        compile(schema)


def test_properties_and_data_with_such_names_stay() -> None:
    schema: Any = {
        "type": "object",
        "properties": {"format": {"const": {"format": "path"}}, "uniqueItems": {"enum": [False]}},
        "default": {"propertyNames": {}},
    }
    assert without_annotations(schema) == schema
    assert follows('{"format": {"format": "path"}, "uniqueItems": false}', json=schema)


@pytest.mark.parametrize("type", [Path, SecretBytes, Json[int], list[Path], Path | None, dict[str, Path]])
def test_types_of_pydantic(type: Any) -> None:
    """They are found wherever a schema is: as a property, an item, a choice, or behind a reference."""
    inner = create_model("Inner", value=(type, ...))
    schema = create_model("Outer", one=(inner, ...), many=(dict[str, inner], ...)).model_json_schema()
    compile(schema)


def test_arguments_of_tools() -> None:
    class Read(BaseModel):
        file: Path = Field(description="what to read")

    grammar = CallGrammar({})
    COMPILER.check(grammar.of(grammar.object(Read.model_json_schema())), "tools")


PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}


def call_follows(text: str, parameters: Any) -> bool:
    """Return whether a call may have these arguments."""
    grammar = CallGrammar({})
    matcher = COMPILER.matcher(grammar.of(grammar.object(parameters)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("keyword", ["items", "anyOf", "$ref"])
def test_calls_have_no_arguments_that_the_schema_does_not_name(keyword: str) -> None:
    value = {"items": PLACE, "anyOf": [PLACE, {"type": "null"}], "$ref": "#/$defs/place"}[keyword]
    parameters = {"properties": {"to": {keyword: value}}, "$defs": {"place": PLACE}}
    one, two = ('{"city": "Oslo"}', '{"city": "Oslo", "mood": 1}')
    if keyword == "items":
        one, two = f"[{one}]", f"[{two}]"
    assert call_follows(f'{{"to": {one}}}', parameters)
    assert not call_follows(f'{{"to": {two}}}', parameters)
    assert not call_follows(f'{{"to": {one}, "from": 1}}', parameters)


def test_calls_may_have_others_if_the_schema_says_so() -> None:
    assert call_follows('{"city": "Oslo", "mood": "x"}', PLACE | {"additionalProperties": {"type": "string"}})
    assert call_follows('{"any": 1}', {"type": "object"})
    assert not call_follows('{"any": 1}', {})


def test_parts_of_all_of_are_not_closed() -> None:
    """Each would forbid what the other names."""
    other = {"type": "object", "properties": {"days": {"type": "integer"}}}
    assert call_follows('{"city": "Oslo", "days": 3}', {"allOf": [PLACE, other]})


@pytest.mark.parametrize("keyword", ["anyOf", "$ref"])
def test_properties_beside_others_are_not_closed(keyword: str) -> None:
    other = {"properties": {"days": {"type": "integer"}}}
    value = {"anyOf": [other, {"$ref": "#/$defs/other"}], "$ref": "#/$defs/other"}[keyword]
    assert call_follows('{"city": "Oslo", "days": 3}', PLACE | {keyword: value, "$defs": {"other": other}})


def test_properties_beside_those_that_are_required_are_closed() -> None:
    parameters = PLACE | {"anyOf": [{"required": ["city"]}, {"required": ["mood"]}]}
    assert call_follows('{"city": "Oslo"}', parameters)
    assert not call_follows('{"city": "Oslo", "days": 3}', parameters)


def test_parts_of_one_of_are_not_closed() -> None:
    """If they were, `{"b": 1}` would fit only one of them, and so the schema, while it fits both as they are."""
    parts = [{"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab"]
    for parameters in ({"oneOf": parts}, {"properties": {"x": {"oneOf": parts}}}):
        grammar = CallGrammar({})
        with pytest.raises(InvalidRequest, match="oneOf"):
            COMPILER.check(grammar.of(grammar.object(parameters)), "tools")


@pytest.mark.parametrize("depth", [200, 300, 450, 600])
def test_a_schema_that_is_nested_deeply_is_read_or_refused(depth: int) -> None:
    """Whoever meets it first: the JSON encoder, a rewrite or the library."""
    schema: Any = {"type": "string", "format": "path"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    tag = {"begin": "<f>", "schema": schema, "end": "</f>"}
    grammar = CallGrammar({})
    for work in (
        lambda: compile(schema),
        lambda: grammar.of(grammar.object(schema)),
        lambda: COMPILER.compile(StructuredOutputsParams(structural_tag={"structures": [tag], "triggers": ["<f>"]})),
    ):
        with contextlib.suppress(InvalidRequest):
            work()


def test_tags() -> None:
    tag = {"begin": "<f>", "schema": {"type": "string", "format": "path"}, "end": "</f>"}
    COMPILER.compile(StructuredOutputsParams(structural_tag={"structures": [tag], "triggers": ["<f>"]}))

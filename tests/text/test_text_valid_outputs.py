"""Tests that outputs drawn with the masks of a schema's grammar are valid, as `jsonschema` sees it.

A schema is either refused, by the keyword that is not known, or followed in every respect.
"""

import json
from contextlib import suppress
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.structured_outputs import StructuredOutputsParams
from shared.text.grammars import GrammarCompiler
from tests.text.random_outputs import RandomModel
from tests.text.vocabulary import make_tokenizer

WORDS = ['{"', '":', '",', "Ġ1", "00", "true", "null", "false", "Ġ{", "Ġ[", "abc", "name", "2024", "http", "://"]
TOKENIZER = make_tokenizer(WORDS)
COMPILER = GrammarCompiler(TOKENIZER)
MODEL = RandomModel(TOKENIZER, COMPILER)
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["value"]}},
    "$ref": "#/$defs/node",
}

SCHEMAS: dict[str, Any] = {
    "any": {},
    "type": {"type": ["integer", "null"]},
    "boolean": {"type": "boolean"},
    "number": {"type": "number"},
    "const": {"const": {"a": [1, None, "x"]}},
    "enum": {"enum": ["a", 1, None, [True], {"b": 2}]},
    "minimum": {"type": "integer", "minimum": -7, "maximum": 12},
    "exclusiveMinimum": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1.5},
    "large bounds": {"type": "integer", "minimum": -(10**15), "maximum": 30_000_000_000},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]+x?$"},
    "pattern within": {"type": "string", "pattern": "ab"},
    "pattern, length": {"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "maxLength": 4},
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
    },
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "string"}], "items": False},
    "prefixItems, more": {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}},
    "tuple of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "null"}, {"type": "string"}],
        "additionalItems": False,
    },
    "properties": OBJECT,
    "required": OBJECT | {"required": ["b", "c"]},
    "additionalProperties": OBJECT | {"additionalProperties": {"type": "boolean"}},
    "no additionalProperties": OBJECT | {"additionalProperties": False, "required": ["a"]},
    "patternProperties": {"type": "object", "patternProperties": {"^x": {"type": "integer"}, "^y": {"type": "null"}}},
    "minProperties": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "oneOf by a const": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, kind: {"type": "integer"}}, "required": ["kind"]}
            for kind in ("a", "b")
        ]
    },
    "allOf": {"allOf": [OBJECT, {"properties": {"a": {"maximum": 5}}, "required": ["a"]}]},
    "keywords beside $ref": {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 10},
    "recursive": TREE,
    "without a type": {"minimum": 3, "minLength": 2, "maxItems": 1},
    "unicode": {"type": "object", "properties": {"größe": {"const": "ß"}}, "required": ["größe"]},
    "quotes in names": {"type": "object", "properties": {'a"b\\c': {"type": "null"}}, "required": ['a"b\\c']},
}


def grammar(schema: Any, **options: Any) -> str:
    return COMPILER.compile(StructuredOutputsParams(json=schema, **options))


def finite(text: str) -> float:
    """Return a number of JSON, which has no bound, as the nearest float."""
    return max(-1e308, min(float(text), 1e308))


def problem(schema: Any, text: str) -> str:
    """Return why a text is no JSON by `schema`; empty if it is."""
    try:
        value = json.loads(text, parse_float=finite)
    except ValueError as error:
        return f"no JSON: {error}"
    if isinstance(value, str) and schema.get("format") in ("time", "date-time"):
        value = value.replace(":60", ":59")  # leap seconds are allowed at any time
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    found = jsonschema.exceptions.best_match(validator(schema, format_checker=FORMATS).iter_errors(value))
    return found.message if found else ""


def draw(schema: Any, seeds: range, **options: Any) -> int:
    """Draw an output for each seed. Return how many came to their end, all of which are valid."""
    text_of_grammar, count = grammar(schema, **options), 0
    for seed in seeds:
        text = MODEL.draw(text_of_grammar, Random(seed))
        if text is not None:
            assert problem(schema, text) == "", (text, schema)
            count += 1
    return count


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_are_valid(name: str) -> None:
    assert draw(SCHEMAS[name], range(40)) >= 4
    assert draw(SCHEMAS[name], range(40, 80), disable_any_whitespace=True) >= 4


def test_an_invalid_output_is_seen() -> None:
    assert problem({"type": "integer"}, '"x"')
    assert problem({"format": "date"}, '"2024-13-01"')
    assert problem({}, "{")


names = st.sampled_from(["a", "b", "größe", 'q"\\', "$ref", ""])
leaves = st.one_of(
    st.fixed_dictionaries({"const": st.one_of(st.none(), st.booleans(), st.integers(-9, 999), st.text(max_size=3))}),
    st.fixed_dictionaries({"enum": st.lists(st.one_of(st.integers(), names, st.none()), min_size=1, max_size=3)}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])}
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            "minimum": st.integers(-1000, 0),
            "maximum": st.integers(1, 1000),
            "multipleOf": st.sampled_from([1, 2, 5, 0.5]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": st.integers(0, 3),
            "maxLength": st.integers(3, 40),
            "pattern": st.sampled_from(["^a*$", "x", "^[0-9]{2,3}$", r"^\d+\.\w$", "^(ab|c)+"]),
            "format": st.sampled_from(["date", "uuid", "ipv4"]),
        },
    ),
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=3)},
        optional={
            "required": st.lists(names, unique=True, max_size=3),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(2, 4),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(2, 4),
        },
    )
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        objects,
        arrays,
        st.fixed_dictionaries({"anyOf": several}),
        st.fixed_dictionaries({"oneOf": several}),
        st.fixed_dictionaries({"allOf": several}),
        st.builds(lambda one: {"$defs": {"one": one}, "items": {"$ref": "#/$defs/one"}, "type": "array"}, inner),
    )


schemas = st.recursive(leaves, larger, max_leaves=6)


@settings(deadline=None, max_examples=60)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_a_schema_is_followed_or_refused(schema: Any, seed: int) -> None:
    with suppress(InvalidRequest):
        draw(schema, range(seed, seed + 2))

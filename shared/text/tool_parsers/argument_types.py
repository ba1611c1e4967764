"""Turns the text of an argument into the value that the tool's JSON schema asks for.

Formats that write arguments as text, such as XML, do not tell the number 5 from the string "5". The schema does.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

JSON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
"""Python's types for the types of a schema, without `string`."""

MAX_LITERAL = 20_000  # characters; Python's own parser takes 20 ms for them, and the interpreter with it

UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
"""What the parsers of JSON and of Python raise for text that they cannot read. The last two come from deep nesting."""

_MAX_DEPTH = 8  # of anyOf in anyOf


def argument_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the types that a schema of parameters allows for one of them; empty if it does not say."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return types_of(schema)


def types_of(schema: Any) -> frozenset[str]:
    """Return the types that the schema of a value allows; empty if it does not say."""
    return _types(schema, _MAX_DEPTH)


def is_only_string(types: frozenset[str]) -> bool:
    """Return whether the value is a string, whatever its text."""
    return types == {"string"}


def convert(text: str, types: frozenset[str]) -> Any:
    """Return the value in `text`: of one of `types` if it can be read so, or else the text itself."""
    if is_only_string(types):
        return text
    value = _parse(text.strip())
    if isinstance(value, str):
        return text
    if not types or any(_is(value, type_) for type_ in types):
        return value
    if types <= {"integer"} and isinstance(value, float) and value.is_integer():
        return int(value)
    return text


def _types(schema: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    listed = schema.get("type")
    if isinstance(listed, str):
        return frozenset([listed])
    if isinstance(listed, list):
        return frozenset(type_ for type_ in listed if isinstance(type_, str))
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(_type_of(value) for value in values)
    choices = [
        choice for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for choice in schema[key]
    ]
    return frozenset(type_ for choice in choices for type_ in _types(choice, depth - 1))


def _type_of(value: Any) -> str:
    return next((name for name in JSON_TYPES if _is(value, name)), "string")


def _is(value: Any, type_: str) -> bool:
    return isinstance(value, JSON_TYPES.get(type_, ())) and (type_ == "boolean" or not isinstance(value, bool))


def _parse(text: str) -> Any:
    """Return the value that a text is in JSON or, as models write it too, in Python; the text if in neither."""
    for read in (json.loads, python_literal):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except UNREADABLE:
            continue
        return value
    return text


def python_literal(text: str) -> Any:
    """Return the value of a literal in Python. Raise one of `UNREADABLE`.

    Unknown escapes in strings are kept, without the warning that Python gives.
    """
    if len(text) > MAX_LITERAL:
        raise ValueError("the literal is too long")
    return ast.literal_eval(re.sub(r"\\(.)", _keep_unknown_escape, text, flags=re.DOTALL))


def _keep_unknown_escape(escape: "re.Match[str]") -> str:
    return escape[0] if escape[1] in "\\'\"abfnrtvxuUN01234567\n" else "\\" + escape[0]


def without_surrogates(text: str) -> str:
    """Return a string with pairs of surrogates joined to characters, and lone ones, which UTF-8 lacks, as U+FFFD.

    JSON and Python may name them in escapes.
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

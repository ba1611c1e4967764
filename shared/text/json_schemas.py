"""Rewrites JSON schemas before the grammar library gets them.

Libraries that make schemas of types write things that demand nothing, which the grammar library would refuse: a format
of their own for a path or a secret, or that the names of properties are strings.
"""

from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import InvalidRequest

FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
"""The formats that the library enforces. JSON Schema calls any other one an annotation."""

ANY_NAME: tuple[Any, ...] = ({}, True, {"type": "string"})
"""Schemas of the names of properties that each name fits."""

IN_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
ALONE = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
"""The keywords whose values hold schemas: in a map by names, in a list, or one."""

Schema = Mapping[str, Any]


def without_annotations(schema: Any) -> Any:
    """Return an equivalent schema without what demands nothing. What is no schema is returned as it is.

    Raise `InvalidRequest` if it is nested too deeply.
    """
    return _rewrite(schema, _without_own_annotations)


def closed(schema: Any) -> Any:
    """Return a schema in which each object that names properties has no others, unless it says otherwise.

    Raise `InvalidRequest` if it is nested too deeply.
    """
    return _rewrite(schema, _closed_itself)


def joins_schemas(schema: Any) -> bool:
    """Return whether an object has to fit several parts of a schema, which cannot be closed then.

    No part of `allOf` names the properties of all, nor do `properties` beside `$ref` or `anyOf`. And what fits one
    closed part of `oneOf` may fit two open ones.
    """
    if not isinstance(schema, Mapping):
        return False
    is_joined = "allOf" in schema or "oneOf" in schema or ("properties" in schema and _refers_to_more(schema))
    return is_joined or any(map(joins_schemas, _parts(schema)))


def _refers_to_more(schema: Schema) -> bool:
    """Return whether a schema may name properties in `$ref` or in parts of `anyOf`."""
    others = schema.get("anyOf", [])
    parts = [part for part in others if isinstance(part, Mapping)] if isinstance(others, list) else []
    return "$ref" in schema or any("properties" in part or "$ref" in part for part in parts)


def _without_own_annotations(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if not _demands_nothing(key, value)}


def _demands_nothing(key: str, value: Any) -> bool:
    match key:
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "propertyNames":
            return value in ANY_NAME
        case "uniqueItems":
            return value is False
    return False


def _closed_itself(schema: Schema) -> Schema:
    names_properties = isinstance(schema.get("properties"), Mapping)
    return {**schema, "additionalProperties": schema.get("additionalProperties", False)} if names_properties else schema


def _parts(schema: Schema) -> list[Any]:
    """Return the schemas that are directly in a schema."""
    parts: list[Any] = [schema[key] for key in ALONE if key in schema]
    for key in IN_MAPS:
        if isinstance(schema.get(key), Mapping):
            parts += schema[key].values()
    for key in IN_LISTS:
        if isinstance(schema.get(key), list):
            parts += schema[key]
    return parts


def _rewrite(schema: Any, rewrite: Callable[[Schema], Schema]) -> Any:
    try:
        return _rewritten(schema, rewrite)
    except RecursionError as error:
        raise InvalidRequest("a JSON schema is nested too deeply") from error


def _rewritten(schema: Any, rewrite: Callable[[Schema], Schema]) -> Any:
    """Return a schema after `rewrite` of itself and of each schema in it."""
    if not isinstance(schema, Mapping):
        return schema
    return {key: _rewritten_value(key, value, rewrite) for key, value in rewrite(schema).items()}


def _rewritten_value(key: str, value: Any, rewrite: Callable[[Schema], Schema]) -> Any:
    if key in IN_MAPS and isinstance(value, Mapping):
        return {name: _rewritten(part, rewrite) for name, part in value.items()}
    if key in IN_LISTS and isinstance(value, list):
        return [_rewritten(part, rewrite) for part in value]
    return _rewritten(value, rewrite) if key in ALONE else value

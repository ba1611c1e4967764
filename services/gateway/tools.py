"""Checks the tools that a chat request offers, and its choice among them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import InvalidRequest, brief
from shared.text.tool_parsers.tool_parser import MAX_NAME, Tools

NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}")

CHOICES = ("none", "auto", "required")


def check_tools(tools: Sequence[Any], choice: Any) -> None:
    """Raise `InvalidRequest`, which names the field, for a wrong tool, or for a choice that cannot be made."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise InvalidRequest(f"{path} must be an object of type 'function'", path)
        name = _check_function(tool.get("function"), f"{path}.function")
        if name in names:
            raise InvalidRequest(f"{path}.function.name {name!r} is the name of two tools", f"{path}.function.name")
        names.add(name)
    _check_choice(choice, names)


def _check_function(function: Any, path: str) -> str:
    """Return the name of a function after a check of its fields."""
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{path} must be an object", path)
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.name must be 1 to {MAX_NAME} letters, digits, '_', '-' or '.', got {brief(name)}", f"{path}.name"
        )
    for field, type_, words in (
        ("description", str, "a string"),
        ("parameters", Mapping, "a JSON schema, which is an object"),
        ("strict", bool, "true or false"),
    ):
        if function.get(field) is not None and not isinstance(function[field], type_):
            raise InvalidRequest(f"{path}.{field} must be {words}", f"{path}.{field}")
    return name


def _check_choice(choice: Any, names: set[str]) -> None:
    if choice is None or choice in ("none", "auto"):
        return
    name = named_tool(choice)
    if choice != "required" and name is None:
        raise InvalidRequest(
            f"tool_choice must be {', '.join(map(repr, CHOICES))} or the name of a function "
            f'({{"type": "function", "function": {{"name": ...}}}}), got {brief(choice)}',
            "tool_choice",
        )
    if not names:
        raise InvalidRequest(f"tool_choice {brief(name or choice)} needs tools", "tool_choice")
    if name is not None and name not in names:
        raise InvalidRequest(f"tool_choice names {brief(name)}, which is not among the tools", "tool_choice")


def named_tool(choice: Any) -> str | None:
    """Return the name of the function that a choice names; None if it names none."""
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def must_call(choice: Any) -> bool:
    """Return whether a choice demands a call."""
    return choice == "required" or named_tool(choice) is not None


def are_strict(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the arguments of a tool must fit its schema."""
    return any(tool["function"].get("strict") for tool in tools)


def for_template(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools as a template gets them: without fields that are null, which it would print."""
    return [dict(tool, function=_without_nulls(tool["function"])) for tool in tools]


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def schemas(tools: Sequence[Mapping[str, Any]], choice: Any) -> Tools:
    """Return the JSON schema of each tool's parameters, by name; {} for a tool without one.

    If the choice names a tool, it is the only one.
    """
    functions, name = [tool["function"] for tool in tools], named_tool(choice)
    chosen = [function for function in functions if name in (None, function["name"])]
    return {function["name"]: function.get("parameters") or {} for function in chosen}

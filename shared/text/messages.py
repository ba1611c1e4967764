"""Chat messages as a request gives them, made plain for a chat template.

A template sees each message's `content` as a string: null or missing is '', text parts are joined by newlines. Tool
calls in a history have their JSON arguments parsed, since templates print them as objects. Other fields of a message
reach the template as they are.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import InvalidRequest

Message = dict[str, Any]


def plain_messages(messages: Sequence[Any]) -> list[Message]:
    """The messages with string contents. Raises `InvalidRequest` naming the one at fault."""
    if not messages:
        raise InvalidRequest("messages must not be empty", "messages")
    return [_plain(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _plain(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object", where)
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where}.role must be a string", f"{where}.role")
    plain = dict(message, content=_text(message.get("content"), f"{where}.content"))
    if plain.get("tool_calls") is not None:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    return plain


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", where)
    return "\n".join(_part(part, f"{where}[{at}]") for at, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type", where)
    if part["type"] != "text":
        raise InvalidRequest(f"{where} has type {part['type']!r}; this model takes only 'text'", where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", f"{where}.text")
    text: str = part["text"]
    return text


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest(f"{where} must be a list of objects", where)
    return [_tool_call(call) for call in calls]


def _tool_call(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # a model wrote it, and it is not JSON: the template prints it as it is
    return dict(call, function=dict(function, arguments=arguments))

"""Normalises the chat messages of a request for a chat template.

A template gets each message's `content` in the format that it reads (`content_format.py`), whichever format the client
used; null or missing content is ''. The arguments of tool calls are parsed from JSON, since most templates print them
as objects. A field that is null, or an empty list of tool calls, is left out, since templates test whether a field
exists. Reasoning gets all of its names; that of calls is `thinking`, too, as the template of gpt-oss calls it. Other
fields of a message reach the template unchanged, and so do those of a part, if the template reads parts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from shared.errors import InvalidRequest, brief
from shared.text.content_format import ContentFormats, Message, text_part

REASONING = ("reasoning_content", "reasoning")
"""The names of a message's reasoning."""


def normalize_messages(messages: Sequence[Any], formats: ContentFormats) -> list[Message]:
    """Return the messages with their contents in these formats. Raise `InvalidRequest`, which names the field."""
    if not messages:
        raise InvalidRequest("messages must not be empty", "messages")
    return [_normalize(message, f"messages[{index}]", formats) for index, message in enumerate(messages)]


def text_of(content: Any, separator: str = "") -> str:
    """Return the text of a message's content, which is a string, a list of parts or None."""
    return separator.join(part["text"] for part in _parts(content, "content"))


def append_text(message: Message, text: str) -> None:
    """Add text to the end of a normalised message's content."""
    if isinstance(message["content"], str):
        message["content"] += text
    else:
        message["content"][-1]["text"] += text


def _normalize(message: Any, path: str, formats: ContentFormats) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path} must be an object", path)
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{path}.role must be a string", f"{path}.role")
    result = {name: value for name, value in message.items() if value is not None}
    result["content"] = formats.for_role(result["role"]).write(_parts(message.get("content"), f"{path}.content"))
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{path}.tool_calls", formats.json_arguments)
        if not result["tool_calls"]:
            del result["tool_calls"]
    if reasoning := next((result[name] for name in REASONING if result.get(name)), None):
        result |= dict.fromkeys(REASONING, reasoning)  # templates and clients know one of the names
        if "tool_calls" in result and not text_of(message.get("content")):  # that of gpt-oss refuses both
            result.setdefault("thinking", reasoning)
    if "function_call" in result:  # the predecessor of tool_calls
        result["function_call"] = _function(result["function_call"], f"{path}.function_call", formats.json_arguments)
    return result


def _parts(content: Any, path: str) -> list[Message]:
    """Return the content as text parts, with their other fields. Raise `InvalidRequest`."""
    if content is None:
        return []
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a string or a list of parts", path)
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, path: str) -> Message:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{path} must be an object with a type", path)
    if part["type"] != "text":
        raise InvalidRequest(f"{path} has type {brief(part['type'])}; this model takes only 'text'", path)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text must be a string", f"{path}.text")
    return {name: value for name, value in part.items() if value is not None}


def _tool_calls(calls: Any, path: str, as_json: bool) -> list[Message]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest(f"{path} must be a list of objects", path)
    return [_tool_call(call, f"{path}[{index}]", as_json) for index, call in enumerate(calls)]


def _tool_call(call: Mapping[str, Any], path: str, as_json: bool) -> Message:
    fields = {name: value for name, value in call.items() if value is not None}
    if "function" not in fields and "name" in fields:  # some templates read a call without this wrapping
        return _function(fields, path, as_json)
    return fields | {"function": _function(fields.get("function"), f"{path}.function", as_json)}


def _function(function: Any, path: str, as_json: bool) -> Message:
    """Return a called function with its arguments as an object, or as JSON. Raise `InvalidRequest`."""
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{path} must be an object", path)
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path}.name must be a string", f"{path}.name")
    arguments = _arguments(function.get("arguments"), f"{path}.arguments")
    return dict(function, arguments=json.dumps(arguments, ensure_ascii=False) if as_json else arguments)


def _arguments(arguments: Any, path: str) -> Mapping[str, Any]:
    """Return the arguments, given as an object or, as in OpenAI's API, as its JSON. None and '' mean {}."""
    if isinstance(arguments, str):
        try:
            arguments = _parse(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{path} must be a JSON object: {error}", path) from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{path} must be a JSON object, not {type(arguments).__name__}", path)
    return arguments


def _parse(text: str) -> Any:
    """Parse JSON. Raise `ValueError`, also for NaN and infinities, which Python would accept."""
    return json.loads(text, parse_constant=_refuse_number, parse_float=_finite)


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is not a number in JSON")

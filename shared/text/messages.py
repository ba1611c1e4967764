"""Chat messages as a request gives them, made plain for a chat template.

A template sees each message's `content` in the form that it reads (`content.py`), whichever way a client wrote it; null
or missing is ''. Tool calls in a history have their JSON arguments parsed, since templates print them as objects. A
field that is null, or an empty list of tool calls, is left out, since templates ask whether it is there. Other fields
of a message reach the template as they are, and so do those of a part, where the template reads parts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from shared.errors import InvalidRequest, brief
from shared.text.content import ContentForms, Message, text_part


def plain_messages(messages: Sequence[Any], forms: ContentForms) -> list[Message]:
    """The messages with contents in these forms. Raises `InvalidRequest` naming the one at fault."""
    if not messages:
        raise InvalidRequest("messages must not be empty", "messages")
    return [_plain(message, f"messages[{at}]", forms) for at, message in enumerate(messages)]


def append_text(message: Message, text: str) -> None:
    """Add to the end of a plain message's content."""
    if isinstance(message["content"], str):
        message["content"] += text
    else:
        message["content"][-1]["text"] += text


def _plain(message: Any, where: str, forms: ContentForms) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object", where)
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where}.role must be a string", f"{where}.role")
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = forms.of(plain["role"]).write(_parts(message.get("content"), f"{where}.content"))
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
        if not plain["tool_calls"]:
            del plain["tool_calls"]
    if "function_call" in plain:  # what tool_calls took the place of
        plain["function_call"] = _function(plain["function_call"], f"{where}.function_call")
    return plain


def _parts(content: Any, where: str) -> list[Message]:
    """The content as text parts, with whatever fields they have beside the text. Raises `InvalidRequest`."""
    if content is None:
        return []
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", where)
    return [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]


def _part(part: Any, where: str) -> Message:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type", where)
    if part["type"] != "text":
        raise InvalidRequest(f"{where} has type {brief(part['type'])}; this model takes only 'text'", where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", f"{where}.text")
    return {name: value for name, value in part.items() if value is not None}


def _tool_calls(calls: Any, where: str) -> list[Message]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest(f"{where} must be a list of objects", where)
    return [_tool_call(call, f"{where}[{at}]") for at, call in enumerate(calls)]


def _tool_call(call: Mapping[str, Any], where: str) -> Message:
    plain = {name: value for name, value in call.items() if value is not None}
    if "function" not in plain and "name" in plain:  # some templates take a call without the wrapping
        return _function(plain, where)
    return plain | {"function": _function(plain.get("function"), f"{where}.function")}


def _function(function: Any, where: str) -> Message:
    """A called function, its arguments as an object. Raises `InvalidRequest`."""
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where} must be an object", where)
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.name must be a string", f"{where}.name")
    return dict(function, arguments=_arguments(function.get("arguments"), f"{where}.arguments"))


def _arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    """The object that `arguments` is or, as in OpenAI's API, whose JSON it is; nothing at all stands for {}."""
    if isinstance(arguments, str):
        try:
            arguments = _parse(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where} must be a JSON object: {error}", where) from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where} must be a JSON object, not {type(arguments).__name__}", where)
    return arguments


def _parse(text: str) -> Any:
    """Read JSON, with no numbers that only Python can read or print. Raises `ValueError`."""
    return json.loads(text, parse_constant=_refuse_number, parse_float=_finite)


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is no number of JSON")

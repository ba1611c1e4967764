"""Makes a chat of a request of the Responses API: its input items become messages, its tools those of a chat.

The items that a model has written before its next turn (reasoning, a message, calls) make one message of a chat. What
is wrong in the chat is wrong in the request: `in_own_words` gives errors the request's names.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, get_args

from services.gateway.api_requests import ChatRequest, ReasoningEffort, ResponsesRequest, check_generation
from shared.errors import InvalidRequest, brief
from shared.params import whole

LOGPROBS = "message.output_text.logprobs"

INCLUDABLE = frozenset(
    {
        LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
        "web_search_call.action.sources", "message.input_image.image_url", "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
    }
)  # fmt: skip
"""The values of `include`. All but the first are about items that do not exist here, and reasoning is never hidden."""

REFUSED = {
    "background": "a response is answered at once",
    "conversation": "conversations are not kept; send the items of all turns as input",
    "previous_response_id": "responses are not kept; send the items of all turns as input",
    "prompt": "there are no stored prompts",
}
"""The fields that are refused, with the reason."""

OWN_FIELDS = frozenset({"tools", "tool_choice", "top_logprobs", "stream_options"})
"""Fields that a chat has too, but with other values."""

COPIED_FIELDS = tuple(
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatRequest.__struct_fields__ and name not in OWN_FIELDS
)

EFFORTS = get_args(ReasoningEffort)
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The types of parts, each with its field that has the text."""

RENAMED = (
    (re.compile(r"response_format\.json_schema|response_format"), "text.format"),
    (re.compile(r"max_completion_tokens|\bmax_tokens\b"), "max_output_tokens"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"needs logprobs to be true"), f"needs include to have {LOGPROBS}"),
)
"""Names and words of a chat's errors, and their own."""

_MESSAGE = re.compile(r"messages\[(\d+)\](\.tool_calls\[\d+\]\.function)?")

MANY_PARTS = 64  # of all items; their conversion takes some 0.1 ms


def has_many_parts(request: ResponsesRequest) -> bool:
    """Return whether making a chat of a request could keep the loop too long."""
    if isinstance(request.input, str):
        return False
    contents = (item.get("content") for item in request.input)
    parts = sum(len(content) if isinstance(content, list) else 1 for content in contents)
    return parts + len(request.tools or ()) > MANY_PARTS


class Chat:
    """The chat that a request makes, and where each of its messages comes from."""

    def __init__(self, request: ResponsesRequest) -> None:
        """Raise `InvalidRequest`."""
        _check(request)
        self._messages: list[dict[str, Any]] = []
        self._origins: dict[str, str] = {}  # by path in the chat
        self._call_ids: set[str] = set()
        if request.instructions is not None:
            self._begin("system", "instructions")["content"] = request.instructions
        if isinstance(request.input, str):
            self._begin("user", "input")["content"] = request.input
        else:
            for index, item in enumerate(request.input):
                self._add(item, f"input[{index}]")
        with self.in_own_words():
            self.request = _chat_request(request, self._messages)

    @contextmanager
    def in_own_words(self) -> Iterator[None]:
        """Raise an error of the chat with the request's names."""
        try:
            yield
        except InvalidRequest as error:
            param = None if error.param is None else self._rename(error.param)
            raise type(error)(self._rename(error.message), param) from error

    def _rename(self, text: str) -> str:
        def origin(match: re.Match[str]) -> str:
            message = self._origins.get(f"messages[{match[1]}]", "input")
            return self._origins.get(match[0]) or message + (match[2] or "")

        text = re.sub(r"\bmessages\b(?!\[)", "input", _MESSAGE.sub(origin, text))
        for pattern, own in RENAMED:
            text = pattern.sub(own, text)
        return text

    def _begin(self, role: str, path: str) -> dict[str, Any]:
        """Return a new message, which comes from `path`."""
        self._origins[f"messages[{len(self._messages)}]"] = path
        message: dict[str, Any] = {"role": role}
        self._messages.append(message)
        return message

    def _answer(self, path: str, *before: str) -> dict[str, Any]:
        """Return the model's last message if it has nothing but the fields `before`; otherwise a new one."""
        last = self._messages[-1] if self._messages else {}
        goes_on = last.get("role") == "assistant" and last.keys() <= {"role", *before}
        return last if goes_on else self._begin("assistant", path)

    def _add(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type")
        match "message" if kind is None and "role" in item else kind:
            case "message":
                self._add_message(item, path)
            case "reasoning":
                if text := _reasoning(item, path):  # to a template, an empty one is reasoning too
                    self._answer(path)["reasoning_content"] = text
            case "function_call":
                self._add_call(item, path)
            case "function_call_output":
                self._add_output(item, path)
            case "item_reference":
                raise InvalidRequest(
                    f"{path} is an item_reference, which is not supported: responses are not kept; send the items "
                    "themselves, as clients do with store false",
                    path,
                )
            case _:
                _refuse_type(kind, path, "'message', 'reasoning', 'function_call' and 'function_call_output'")

    def _add_message(self, item: Mapping[str, Any], path: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            names = ", ".join(map(repr, ROLES))
            raise InvalidRequest(f"{path}.role must be one of {names}, got {brief(role)}", f"{path}.role")
        content = _content(item.get("content"), f"{path}.content")
        message = self._answer(path, "reasoning_content") if role == "assistant" else self._begin(role, path)
        message["content"] = content

    def _add_call(self, item: Mapping[str, Any], path: str) -> None:
        call_id, name = _text(item, "call_id", path), _text(item, "name", path)
        function = {"name": name, "arguments": _text(item, "arguments", path)}
        message = self._answer(path, "reasoning_content", "content", "tool_calls")
        calls = message.setdefault("tool_calls", [])
        self._origins[f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}].function"] = path
        calls.append({"id": call_id, "type": "function", "function": function})
        self._call_ids.add(call_id)

    def _add_output(self, item: Mapping[str, Any], path: str) -> None:
        call_id = _text(item, "call_id", path)
        if call_id not in self._call_ids:
            path = f"{path}.call_id"
            raise InvalidRequest(f"{path} {brief(call_id)} is of no function_call before it", path)
        output = _content(item.get("output"), f"{path}.output")
        self._begin("tool", path).update(tool_call_id=call_id, content=output)


def _content(content: Any, path: str) -> Any:
    """Return the content of a chat's message."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a string or a list of parts", path)
    return [{"type": "text", "text": _part(part, f"{path}[{index}]")} for index, part in enumerate(content)]


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        _refuse_type(kind, path, "text")
    return _text(part, TEXT_PARTS[kind], path)


def _reasoning(item: Mapping[str, Any], path: str) -> str:
    """Return the text of reasoning, or else that of its summary. It is empty if another server has encrypted it."""
    for field in ("content", "summary"):
        parts = [] if item.get(field) is None else item[field]
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise InvalidRequest(f"{path}.{field} must be a list of parts", f"{path}.{field}")
        if parts:
            return "".join(_text(part, "text", f"{path}.{field}[{index}]") for index, part in enumerate(parts))
    return ""


def _text(fields: Mapping[str, Any], name: str, path: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name} must be a string, got {brief(value)}", f"{path}.{name}")
    return value


def _refuse_type(kind: Any, path: str, taken: str) -> NoReturn:
    raise InvalidRequest(f"{path} has type {brief(kind)}, which is not supported: only {taken} can be used", path)


def _chat_request(request: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """Return the request of a chat. Raise `InvalidRequest`, in its words or in those of the request."""
    tools, choice = _tools(request.tools or (), request.tool_choice)
    chat = ChatRequest(
        messages=messages,
        tools=tools or None,
        tool_choice=choice,
        response_format=_response_format(request.text or {}),
        reasoning_effort=_effort(request.reasoning or {}),
        max_completion_tokens=request.max_output_tokens,
        logprobs=LOGPROBS in (request.include or ()),
        top_logprobs=request.top_logprobs,
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        **{name: getattr(request, name) for name in COPIED_FIELDS},
    )
    check_generation(chat)
    return chat


def _check(request: ResponsesRequest) -> None:
    if not request.input:
        raise InvalidRequest("input must not be empty", "input")
    for name, reason in REFUSED.items():
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported: {reason}", name)
    if request.max_tool_calls is not None:
        whole("max_tool_calls", request.max_tool_calls)
    for value in request.include or ():
        if value not in INCLUDABLE:
            raise InvalidRequest(f"include has {brief(value)}, which is not supported", "include")


def _tools(tools: Sequence[Mapping[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], Any]:
    """Return the tools and the choice of a chat. Those that are not among the allowed ones are left out."""
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            _refuse_type(tool.get("type"), f"tools[{index}]", "'function'")
    functions: list[dict[str, Any]] = [{"type": "function", "function": _without_type(tool)} for tool in tools]
    if not isinstance(choice, Mapping):
        return functions, choice
    match choice.get("type"):
        case "function":
            return functions, {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            names = _allowed(choice, [tool.get("name") for tool in tools])
            allowed = [function for function in functions if function["function"].get("name") in names]
            return allowed, choice.get("mode")
        case kind:
            _refuse_type(kind, "tool_choice", "'function' and 'allowed_tools'")


def _allowed(choice: Mapping[str, Any], names: Sequence[Any]) -> set[str]:
    """Return the names of the tools that a choice allows."""
    if choice.get("mode") not in ("auto", "required"):
        raise InvalidRequest(
            f"tool_choice.mode must be 'auto' or 'required', got {brief(choice.get('mode'))}", "tool_choice.mode"
        )
    tools = choice.get("tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest("tool_choice.tools must be a list of tools", "tool_choice.tools")
    for index, tool in enumerate(tools):
        path = f"tool_choice.tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            _refuse_type(tool.get("type") if isinstance(tool, Mapping) else tool, path, "'function'")
        if _text(tool, "name", path) not in names:
            raise InvalidRequest(f"{path} names {brief(tool['name'])}, which is not among the tools", path)
    return {tool["name"] for tool in tools}


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the demand on a chat's form. Its schema has a name beside it, and not around it."""
    format = text.get("format")
    if format is None:
        return None
    if not isinstance(format, Mapping) or format.get("type") not in ("text", "json_object", "json_schema"):
        kind = format.get("type") if isinstance(format, Mapping) else format
        raise InvalidRequest(
            f"text.format.type must be 'text', 'json_object' or 'json_schema', got {brief(kind)}", "text.format.type"
        )
    if format["type"] != "json_schema":
        return {"type": format["type"]}
    return {"type": "json_schema", "json_schema": _without_type(format)}


def _without_type(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "type"}


def _effort(reasoning: Mapping[str, Any]) -> Any:
    effort = reasoning.get("effort")
    if effort is not None and effort not in EFFORTS:
        names = ", ".join(map(repr, EFFORTS))
        raise InvalidRequest(f"reasoning.effort must be one of {names}, got {brief(effort)}", "reasoning.effort")
    return effort

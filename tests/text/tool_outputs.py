"""Outputs of the model families whose tool calls are parsed, and a writer of each family's format."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shared.text.deltas import CallArguments, CallBegin, Content, Delta, Reasoning
from shared.text.message_parser import HARMONY_TOOLS, MessageFormat, MessageParser, ParserChoice

Arguments = Mapping[str, Any]

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "ratio": {"type": "number"},
            "exact": {"type": "boolean"},
            "items": {"type": "array"},
            "options": {"type": "object"},
            "any": {},
        },
    },
    "get-time.now": {},
}


class Call(NamedTuple):
    """A tool call, with its arguments parsed."""

    name: str
    arguments: Any


class Message(NamedTuple):
    """What a parser has found."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class RawMessage(NamedTuple):
    """What a parser has found, with the arguments of calls as they came."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    has_calls: bool

    def parsed(self) -> Message:
        calls = tuple(Call(name, json.loads(arguments)) for name, arguments in self.calls)
        return Message(self.content, self.reasoning, calls)


def parser_of(
    family: str | None, *, reasoning: str | None = None, is_open: bool = False, parallel: bool = True, **special: int
) -> MessageParser:
    """Return a parser for `TOOLS`. `special` are markers that are special tokens."""
    if family == HARMONY_TOOLS:
        reasoning = "openai_gptoss"
    choice = ParserChoice(reasoning, family, special)
    return MessageFormat(choice, TOOLS, parallel, is_open).parser()


def read(parser: MessageParser, text: str, cuts: Sequence[int] = ()) -> RawMessage:
    """Parse `text`, cut at these positions."""
    bounds = [0, *sorted(cuts), len(text)]
    deltas: list[Delta] = []
    for begin, end in itertools.pairwise(bounds):
        deltas += parser.feed(text[begin:end])
    return joined(deltas + parser.finish(), parser.has_calls)


def joined(deltas: Sequence[Delta], has_calls: bool) -> RawMessage:
    """Join the deltas of a message. A call begins once, before its arguments."""
    content, reasoning, calls, ids = "", "", [], set()
    for delta in deltas:
        match delta:
            case Content():
                content += delta.text
            case Reasoning():
                reasoning += delta.text
            case CallBegin():
                assert delta.index == len(calls)
                assert delta.id not in ids
                ids.add(delta.id)
                calls.append((delta.name, ""))
            case CallArguments():
                assert delta.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return RawMessage(content, reasoning, tuple(calls), has_calls)


def read_everywhere(make_parser: Callable[[], MessageParser], text: str) -> RawMessage:
    """Parse `text` as a whole, and check that every single cut, and all of them, give the same."""
    whole = read(make_parser(), text)
    for cuts in ([at] for at in range(1, len(text))):
        assert read(make_parser(), text, cuts) == whole, cuts
    assert read(make_parser(), text, range(1, len(text))) == whole
    return whole


def _json_object(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def _json_list(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(map(_json_object, calls)) + "]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json_object(call)}\n</tool_call>" for call in calls)


def _deepseek_v3(calls: Sequence[Call]) -> str:
    parts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{_json(call.arguments)}\n```<｜tool▁call▁end｜>"
        for call in calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(parts)}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    parts = [
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{_json(call.arguments)}<｜tool▁call▁end｜>" for call in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(parts)}<｜tool▁calls▁end｜>"


def _kimi_k2(calls: Sequence[Call]) -> str:
    parts = [
        f"<|tool_call_begin|>functions.{call.name}:{index}<|tool_call_argument_begin|>{_json(call.arguments)}"
        "<|tool_call_end|>"
        for index, call in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"


def _glm(calls: Sequence[Call], newline: str) -> str:
    def write(call: Call) -> str:
        pairs = [
            f"<arg_key>{name}</arg_key>{newline}<arg_value>{_plain(value)}</arg_value>{newline}"
            for name, value in call.arguments.items()
        ]
        return f"<tool_call>{call.name}{newline}{''.join(pairs)}</tool_call>"

    return newline.join(map(write, calls))


def _qwen3_coder(calls: Sequence[Call]) -> str:
    def write(call: Call) -> str:
        pairs = [f"<parameter={name}>\n{_plain(value)}\n</parameter>\n" for name, value in call.arguments.items()]
        return f"<tool_call>\n<function={call.name}>\n{''.join(pairs)}</function>\n</tool_call>"

    return "\n".join(map(write, calls))


def _pythonic(calls: Sequence[Call]) -> str:
    def write(call: Call) -> str:
        return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"

    return "[" + ", ".join(map(write, calls)) + "]"


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{_json(call.arguments)}<|call|>"
        for call in calls
    )


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "glm45": lambda calls: _glm(calls, "\n"),
    "glm47": lambda calls: _glm(calls, ""),
    "granite": lambda calls: "<|tool_call|>" + _json_list(calls),
    "granite4": _hermes,
    "hermes": _hermes,
    "kimi_k2": _kimi_k2,
    "lfm2": lambda calls: "<|tool_call_start|>" + _pythonic(calls) + "<|tool_call_end|>",
    "llama3_json": lambda calls: "\n" + "; ".join(_json_object(call, "parameters") for call in calls),
    "llama4_pythonic": lambda calls: "<|python_start|>" + _pythonic(calls) + "<|python_end|>",
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{call.name}[ARGS]{_json(call.arguments)}" for call in calls),
    "openai": _harmony,
    "phi4_mini_json": lambda calls: "functools" + _json_list(calls),
    "pythonic": lambda calls: "\n" + _pythonic(calls),
    "qwen3_coder": _qwen3_coder,
    "qwen3_xml": _qwen3_coder,
}
"""Writes calls as a family does."""

TEXT_FORMATS = {"glm45", "glm47", "qwen3_coder", "qwen3_xml"}
"""Families that write strings without quotes, so that a string cannot hold the end marker."""

TYPED_FORMATS = {*TEXT_FORMATS, "pythonic", "llama4_pythonic", "lfm2"}
"""Families that write arguments one by one, so that their names must be identifiers."""

"""Writes the grammar of a chat's whole output: reasoning, which is free, and then calls, or an answer of some form.

The calls and the answer are grammars by themselves, in llguidance's notation, of which each keeps its own rules.
"""

from collections.abc import Mapping

from shared.errors import InvalidRequest
from shared.text import reasoning_parsers, tool_parsers
from shared.text.harmony import CHANNEL, CONSTRAIN, MESSAGE, START, HarmonyParser
from shared.text.lark import ANY_TEXT, join_grammars
from shared.text.message_parser import HARMONY_REASONING, MessageFormat
from shared.text.tool_parsers.call_grammar import CallGrammar

SPACE = r"/ \n{0,2}|\n{1,2}/"
"""What a model may write between its reasoning and the answer. The parser drops it."""


def message_grammar(format: MessageFormat, answer: str = "", *, must_call: bool = False) -> str:
    """Return the grammar of an output; "" if it is free.

    `answer` is the grammar of an answer without calls; "" if that is free. If `must_call`, there is at least one call
    instead. Calls that the model may make have arguments by the tools' schemas. Raise `InvalidRequest` for a schema
    that is none, and for a demand that the format of calls does not allow.
    """
    if format.choice.reasoning == HARMONY_REASONING:
        return _harmony(format, answer, must_call)
    if must_call:
        return _behind_reasoning(format, {"calls": _calls(format)})
    if answer and not format.tools:
        return _behind_reasoning(format, {"answer": answer})
    if answer:
        if not _calls_open_by_marker(format):
            raise InvalidRequest(
                f"this model's calls (parser {format.choice.tools}) have no marker by which they could be told from an "
                "answer of a demanded form: set tool_choice to 'none' or 'required', or leave the form out",
                "tools",
            )
        return _behind_reasoning(format, {"calls": _calls(format), "answer": answer})
    if format.tools:
        return _behind_reasoning(format, {"calls": _calls(format, in_text=True)})
    return ""


def _calls_open_by_marker(format: MessageFormat) -> bool:
    return tool_parsers.FAMILIES[str(format.choice.tools)].opens_by_marker


def _calls(format: MessageFormat, *, in_text: bool = False) -> str:
    family = tool_parsers.FAMILIES[str(format.choice.tools)]
    return family.grammar(format.tools or {}, format.choice.token_ids, parallel=format.parallel, in_text=in_text)


def _behind_reasoning(format: MessageFormat, parts: Mapping[str, str]) -> str:
    """Return the grammar of one of `parts` behind the reasoning, if there may be some."""
    grammar = CallGrammar(format.choice.token_ids)
    reasoning = _reasoning(grammar, format)
    if not reasoning and len(parts) == 1:
        return next(iter(parts.values()))
    either = " | ".join(f"@{name}" for name in parts)
    return join_grammars(grammar.of(f"{reasoning} ({either})"), parts)


def _reasoning(grammar: CallGrammar, format: MessageFormat) -> str:
    """Return the expression for the reasoning that comes first; "" if there can be none."""
    family = reasoning_parsers.FAMILIES.get(format.choice.reasoning or "")
    if family is None or format.reasoning_is_over:
        return ""
    rest = f"({' | '.join(map(grammar.until, family.ends))}) ({SPACE})?"
    if format.reasoning_is_open:
        return rest
    return f"(({' | '.join(map(grammar.marker, family.begins))}) {rest})?"


def _harmony(format: MessageFormat, answer: str, must_call: bool) -> str:
    """Return the grammar of messages in harmony's format, of which the last is the answer or a call."""
    if format.reasoning_is_over or not (answer or must_call or format.tools):
        return answer
    grammar = CallGrammar(format.choice.token_ids)
    start, channel, constrain, message = map(grammar.marker, (START, CHANNEL, CONSTRAIN, MESSAGE))
    before = f'{channel} ("analysis" | "commentary") {message} {grammar.until("<|end|>")} {start} "assistant"'
    parts = {}
    last = []
    if format.tools:
        parts["calls"] = HarmonyParser.grammar(format.tools, format.choice.token_ids)
        last.append("@calls")
    if not must_call:
        parts["answer"] = answer or f"start: {ANY_TEXT}"
        last.append(f'{channel} "final" (" "? {constrain} "json")? {message} @answer')
    return join_grammars(grammar.of(f"({before})* ({' | '.join(last)})"), parts)

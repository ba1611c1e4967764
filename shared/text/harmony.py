"""The format of gpt-oss, called harmony: an output is several messages, each with a header that names its channel.

    <|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary
    to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

    <|channel|>final<|message|>It rains.<|return|>

The channel `analysis` is reasoning. A message to a function is a call, with its arguments as text. Other messages are
for the user: the answer (`final`), and what the model says before a call (`commentary`).
"""

import json
import re
import secrets
from collections.abc import Mapping
from functools import partial

from shared.text.deltas import CallArguments, CallBegin, Content, Reasoning, Span
from shared.text.stream_parser import StreamParser
from shared.text.text_reader import Parsing
from shared.text.tool_parsers.argument_types import UNREADABLE
from shared.text.tool_parsers.call_grammar import CallGrammar
from shared.text.tool_parsers.tool_parser import Tools

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, *ENDS)
SPECIAL_TOKENS = (*MARKERS, CONSTRAIN)

FUNCTIONS = "functions."
"""Functions of the user are in this name space. Messages to others, such as a browser's, are part of the reasoning."""

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(StreamParser):
    """Parses the messages of one output. Several of one kind are joined by a newline.

    Unless `with_calls`, a message to a function is content.
    """

    def __init__(self, *, with_calls: bool) -> None:
        super().__init__()
        self._with_calls = with_calls
        self.spans: list[Span] = []  # of the reasoning
        self.num_calls = 0
        self.num_complete = 0
        self._joints: dict[type[Content | Reasoning], str] = {}  # written before the next message of a kind
        self._arguments: list[str] = []  # of the last call

    @classmethod
    def grammar(cls, tools: Tools, token_ids: Mapping[str, int], *, parallel: bool = True) -> str:
        """Return a grammar of a call of one of `tools`, for llguidance. The model writes one call an output.

        `token_ids` are the ids of the markers. The last one, <|call|>, is not in the grammar, since it ends an output.
        """
        grammar = CallGrammar(token_ids)
        channel, constrain, message = map(grammar.marker, (CHANNEL, CONSTRAIN, MESSAGE))
        calls = [
            f"{grammar.text(f'{name} ')} {constrain} {grammar.text('json')} {message} {grammar.object(schema)}"
            for name, schema in tools.items()
        ]
        begin = f"{channel} {grammar.text(f'commentary to={FUNCTIONS}')}"
        return grammar.finish(begin, calls, "", "", parallel=False)

    def _parse(self) -> Parsing[None]:
        if (yield from self._reader.literal(" to=", "to=")):  # the prompt ends inside the first header
            self._reader.restart()
            yield from self._read_messages(START)
        while marker := (yield from self._reader.until(MARKERS, partial(self._add, Content))):
            yield from self._read_messages(marker)

    def _read_messages(self, marker: str) -> Parsing[None]:
        """Read the messages behind a marker, as long as one follows the other."""
        while marker in (START, CHANNEL):
            header, end = yield from self._reader.text_until(MESSAGE, *ENDS)
            marker = (yield from self._read_message(marker + header)) if end == MESSAGE else end

    def _read_message(self, header: str) -> Parsing[str]:
        """Read a message behind its header. Return the marker that ended it."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_call = recipient is not None and recipient[1].startswith(FUNCTIONS)
        if recipient and is_call and self._with_calls:
            return (yield from self._read_call(recipient[1].removeprefix(FUNCTIONS)))
        if is_call or (not recipient and not (channel and channel[1] == "analysis")):
            marker = yield from self._reader.until(MARKERS, partial(self._add, Content))
            self._joints[Content] = "\n"
            return marker
        self._reader.release()
        begin = self._reader.position
        self.spans.append(Span(begin))
        marker = yield from self._reader.until(MARKERS, partial(self._add, Reasoning))
        self.spans[-1] = Span(begin, self._reader.position - len(marker), self._reader.position)
        self._joints[Reasoning] = "\n"
        return marker

    def _read_call(self, name: str) -> Parsing[str]:
        self._reader.release()
        self._arguments = []
        self._deltas.append(CallBegin(self.num_calls, f"call_{secrets.token_hex(12)}", name))
        self.num_calls += 1
        marker = yield from self._reader.until(MARKERS, self._add_arguments, drop_partial=True)
        if not "".join(self._arguments).strip() and marker:
            self._add_arguments("{}")
        self.num_complete += _is_json("".join(self._arguments))  # its last token, <|call|>, ends the output unseen
        return marker

    def _add(self, kind: type[Content | Reasoning], text: str) -> None:
        self._deltas.append(kind(self._joints.pop(kind, "") + text))

    def _add_arguments(self, text: str) -> None:
        self._arguments.append(text)
        self._deltas.append(CallArguments(self.num_calls - 1, text))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except UNREADABLE:
        return False
    return True

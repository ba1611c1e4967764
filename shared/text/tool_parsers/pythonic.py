"""Calls as a list of Python's, of Llama 4, Llama 3.2, LFM2 and others. Some put markers around it:

<|python_start|>[get_weather(city="Paris"), get_time(zone="CET")]<|python_end|>
"""

import json
import re
from typing import Any, ClassVar

from shared.text.text_reader import Parsing
from shared.text.tool_parsers.argument_types import UNREADABLE, convert, python_literal
from shared.text.tool_parsers.call_grammar import CallGrammar, Schema, properties
from shared.text.tool_parsers.text_arguments import TextArgumentsParser
from shared.text.tool_parsers.tool_parser import Frame

_COMMA_OR_SPACE = ", \t\r\n"

_KEYWORD = re.compile(r"\w*")
_OUTSIDE_STRINGS = re.compile(r"[^'\"()\[\]{},]*")
_IN_STRING = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}


class PythonicParser(TextArgumentsParser):
    """A list at the beginning of a line holds calls if it begins with a tool's."""

    begins: ClassVar[tuple[str, ...]] = ("[",)
    opens_by_marker: ClassVar[bool] = False

    @classmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Schema) -> str:
        """Return the expression for a call with its values as JSON, which the parser reads too."""
        return f"{grammar.text(name + '(')} {cls._arguments(grammar, schema)} {grammar.text(')')}"

    @classmethod
    def _line(cls, grammar: CallGrammar, name: str, schema: Schema, parallel: bool) -> tuple[str, str]:
        others = f"({grammar.text(', ')} call)*" if parallel else ""
        rest = [cls._arguments(grammar, schema), grammar.text(")"), others, grammar.text("]")]
        return rf"\[\s*{re.escape(name)}\(", " ".join(rest)

    @classmethod
    def _arguments(cls, grammar: CallGrammar, schema: Schema) -> str:
        listed = sorted(properties(schema), key=lambda item: not item[2])  # those that must be there first
        pairs = [f"{grammar.text(key + '=')} {grammar.json(value)}" for key, value, _ in listed]
        num_required = sum(is_required for _, _, is_required in listed)
        comma = grammar.text(", ")
        optional = [f"({comma} {pair})?" for pair in pairs]
        if num_required:
            arguments = " ".join([f" {comma} ".join(pairs[:num_required]), *optional[num_required:]])
        else:
            begins = [" ".join([pair, *optional[index + 1 :]]) for index, pair in enumerate(pairs)]
            arguments = f"({' | '.join(begins)})?" if begins else ""
        return arguments

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        begin, end = grammar.text("["), grammar.text("]")
        if cls.ends:
            begin, end = f"{grammar.opening(cls.begins[0])} {begin}", f"{end} {grammar.marker(cls.ends[0])}"
        return Frame(begin, grammar.text(", "), end)

    def _read_calls(self, marker: str) -> Parsing[bool]:
        if marker == "[" and not self._at_line_start:
            return False
        if marker != "[":
            yield from self._reader.skip_space()
            if not (yield from self._reader.literal("[")):
                return False
        num_before = self.num_calls
        while (yield from self._read_call(only_known=marker == "[" and self.num_calls == num_before)):
            yield from self._reader.skip(_COMMA_OR_SPACE)
        if self.num_calls == num_before:
            return False
        yield from self._reader.literal("]")
        if self.ends:
            yield from self._reader.skip_space()
            yield from self._reader.literal(*self.ends)
        return True

    def _read_call(self, *, only_known: bool) -> Parsing[bool]:
        """Read one call. Return whether there was one, to its end."""
        reader = self._reader
        yield from reader.skip_space()
        name = yield from self._read_name()
        if not name or (only_known and name not in self._tools) or not (yield from reader.literal("(")):
            return False
        self._begin_call(name)
        while True:
            yield from reader.skip(_COMMA_OR_SPACE)
            if (yield from reader.literal(")")):
                self._end_call()
                return True
            key = yield from reader.matching(_KEYWORD)
            yield from reader.skip_space()
            if not key or not (yield from reader.literal("=")):
                return False
            text = yield from self._read_value()
            if text is None:
                return False
            if key not in self._names:
                self._add_argument(key, self._value(text.strip(), key))

    def _value(self, text: str, key: str) -> Any:
        if text[:1] in ("'", '"'):
            for read in (json.loads, python_literal):
                try:
                    return str(read(text))
                except UNREADABLE:
                    continue
            return text
        return convert(text, self._types(key) - {"string"})

    def _read_value(self) -> Parsing[str | None]:
        """Read an argument's value. Return its text, or None if it does not end."""
        reader = self._reader
        pieces: list[str] = []
        depth = 0
        while True:
            pieces.append((yield from reader.matching(_OUTSIDE_STRINGS)))
            character = yield from reader.peek()
            if not character:
                return None
            if depth == 0 and character in ",)":
                return "".join(pieces)
            depth += (character in "([{") - (character in ")]}")
            if character in _IN_STRING:
                text = yield from self._read_string_literal()
                if text is None:
                    return None
                pieces.append(text)
            else:
                pieces.append(reader.take(1))

    def _read_string_literal(self) -> Parsing[str | None]:
        """Read a string in Python, with its quotes. Return None if it does not end."""
        reader = self._reader
        quote = yield from reader.literal("'", '"', "'''", '"""', "''", '""')
        if len(quote) == 2:
            return quote
        pieces = [quote]
        while True:
            pieces.append((yield from reader.matching(_IN_STRING[quote[0]])))
            if (yield from reader.literal(quote)):
                return "".join([*pieces, quote])
            length = 2 if (yield from reader.peek()) == "\\" else 1
            text = yield from reader.peek(length)
            if len(text) < length:
                return None
            pieces.append(reader.take(length))


class Llama4PythonicParser(PythonicParser):
    """Llama 4."""

    begins = ("<|python_start|>", "[")
    ends = ("<|python_end|>",)
    opens_by_marker = True


class Lfm2Parser(PythonicParser):
    """LFM2, which always writes its markers."""

    begins = ("<|tool_call_start|>",)
    ends = ("<|tool_call_end|>",)
    opens_by_marker = True

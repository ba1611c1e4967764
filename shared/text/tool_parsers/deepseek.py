"""Calls of DeepSeek V3 and R1, and the shorter form of V3.1. Special tokens separate the parts:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
<｜tool▁calls▁end｜>
"""

from shared.text.text_reader import Parsing
from shared.text.tool_parsers.call_grammar import CallGrammar, Schema
from shared.text.tool_parsers.json_calls import JsonCallParser
from shared.text.tool_parsers.tool_parser import Frame

SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```json"


class DeepSeekV31Parser(JsonCallParser):
    """A call's name stands before the separator, its arguments behind it."""

    begins = ("<｜tool▁call▁begin｜>",)
    ends = ("<｜tool▁call▁end｜>",)
    frames = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", SEPARATOR)

    @classmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Schema) -> str:
        begin, separator, end = map(grammar.marker, (cls.begins[0], SEPARATOR, cls.ends[0]))
        return f"{begin} {grammar.text(name)} {separator} {grammar.object(schema)} {end}"

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        return Frame(grammar.opening(cls.frames[0]), "", grammar.marker(cls.frames[1]))

    def _read_calls(self, marker: str) -> Parsing[bool]:
        name = yield from self._read_head()
        if not name:
            return False
        self._begin_call(name)
        if (yield from self._read_arguments()):
            yield from self._read_end("` \t\r\n}]")
        return True

    def _read_head(self) -> Parsing[str]:
        """Read up to the arguments. Return the name; '' if it is not followed by what it must be."""
        name = yield from self._read_name()
        return name if (yield from self._reader.literal(SEPARATOR)) else ""


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Before the separator stands `function`. The name follows it, and the arguments are a block of Markdown."""

    @classmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Schema) -> str:
        begin, separator, end = map(grammar.marker, (cls.begins[0], SEPARATOR, cls.ends[0]))
        head, fence_end = grammar.text(f"{name}\n{FENCE}\n"), grammar.text("\n```")
        return f"{begin} {grammar.text('function')} {separator} {head} {grammar.object(schema)} {fence_end} {end}"

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        return super()._frame(grammar)._replace(separator=grammar.text("\n"))

    def _read_head(self) -> Parsing[str]:
        yield from self._read_name()
        if not (yield from self._reader.literal(SEPARATOR)):
            return ""
        name = yield from self._read_name()
        yield from self._reader.skip_space()
        return name if (yield from self._reader.literal(FENCE)) else ""

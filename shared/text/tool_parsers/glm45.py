"""Calls of GLM 4.5 to 4.7, as a name and pairs of tags. GLM 4.7 leaves out the newlines:

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

from typing import ClassVar

from shared.text.text_reader import Parsing
from shared.text.tool_parsers.call_grammar import CallGrammar, Schema, properties
from shared.text.tool_parsers.text_arguments import TextArgumentsParser
from shared.text.tool_parsers.tool_parser import Frame

KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class Glm45Parser(TextArgumentsParser):
    """Each call has tags of its own."""

    newline: ClassVar = "\n"
    begins = ("<tool_call>",)
    ends = ("</tool_call>",)
    frames = (KEY, KEY_END, VALUE, VALUE_END)

    @classmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Schema) -> str:
        key_begin, key_end, value_begin = map(grammar.marker, (KEY, KEY_END, VALUE))
        newline = grammar.text(cls.newline)
        parts = [grammar.opening(cls.begins[0]), grammar.text(name), newline]
        for key, value, is_required in properties(schema):
            text = cls._argument(grammar, value, VALUE_END)
            pair = f"{key_begin} {grammar.text(key)} {key_end} {newline} {value_begin} {text} {newline}"
            parts.append(pair if is_required else f"({pair})?")
        return " ".join([*parts, grammar.marker(cls.ends[0])])

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        return Frame(separator=grammar.text(cls.newline))

    def _read_calls(self, marker: str) -> Parsing[bool]:
        reader = self._reader
        yield from reader.skip_space()
        name = yield from self._read_name()
        yield from reader.skip_space()
        tag = yield from reader.literal(KEY, *self.ends)
        if not name or not tag:
            return False
        self._begin_call(name)
        while tag == KEY:
            key, key_end = yield from reader.text_until(KEY_END)
            _, value = yield from reader.text_until(VALUE)
            if not key_end or not value or not (yield from self._read_argument(key.strip(), VALUE_END)):
                return True
            _, tag = yield from reader.text_until(KEY, *self.ends)
        if tag:
            self._end_call()
        return True


class Glm47Parser(Glm45Parser):
    """GLM 4.7. The calls of either are read by both."""

    newline = ""

"""Calls of Kimi K2. The model writes the ids itself: the tool's name and the number of the call in the conversation.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>
"""

import re

from shared.text.text_reader import Parsing
from shared.text.tool_parsers.call_grammar import CallGrammar, Schema
from shared.text.tool_parsers.json_calls import JsonCallParser
from shared.text.tool_parsers.tool_parser import Frame

ID = re.compile(r"[\w.:-]*")
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"


class KimiK2Parser(JsonCallParser):
    """The id comes first, then the arguments."""

    begins = ("<|tool_call_begin|>",)
    ends = ("<|tool_call_end|>",)
    frames = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", ARGUMENTS_BEGIN)

    @classmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Schema) -> str:
        begin, arguments, end = map(grammar.marker, (cls.begins[0], ARGUMENTS_BEGIN, cls.ends[0]))
        return f"{begin} {grammar.text(f'functions.{name}:')} /[0-9]+/ {arguments} {grammar.object(schema)} {end}"

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        return Frame(grammar.opening(cls.frames[0]), "", grammar.marker(cls.frames[1]))

    def _read_calls(self, marker: str) -> Parsing[bool]:
        yield from self._reader.skip_space()
        id = yield from self._reader.matching(ID)
        yield from self._reader.skip_space()
        begin = yield from self._reader.literal(ARGUMENTS_BEGIN)
        name = id.rpartition(":")[0].removeprefix("functions.") if ":" in id else id.removeprefix("functions.")
        if not begin or not name:
            return False
        self._begin_call(name, id)
        if (yield from self._read_arguments()):
            yield from self._read_end()
        return True

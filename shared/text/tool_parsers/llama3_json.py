"""Calls of Llama 3.1 to 3.3, as JSON that has no marker, or stands behind <|python_tag|>:

{"name": "get_weather", "parameters": {"city": "Paris"}}
"""

import re

from shared.text.text_reader import Parsing
from shared.text.tool_parsers.call_grammar import CallGrammar, Schema
from shared.text.tool_parsers.json_calls import JsonCallParser
from shared.text.tool_parsers.tool_parser import Frame

SPACE = r"[ \n\r\t]{0,16}"
"""White space that a model may write within a call."""


class Llama3JsonParser(JsonCallParser):
    """An object at the beginning of a line is a call if it names a tool. Several are separated by anything or nothing.

    The separators that are read are white space, `;` and `,`.
    """

    begins = ("<|python_tag|>", "{")
    opens_by_marker = False

    @classmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Schema) -> str:
        return cls._object(grammar, name, schema, "parameters")

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        return Frame(separator=grammar.text("; "))

    @classmethod
    def _line(cls, grammar: CallGrammar, name: str, schema: Schema, parallel: bool) -> tuple[str, str]:
        kind = rf'"type"{SPACE}:{SPACE}"function"{SPACE},{SPACE}'
        opening = rf'\{{{SPACE}({kind})?"name"{SPACE}:{SPACE}"{re.escape(name)}"'
        key = f'/{SPACE},{SPACE}"(parameters|arguments)"{SPACE}:{SPACE}/'
        return opening, f"{key} {grammar.object(schema)} /{SPACE}\\}}/"

    def _read_calls(self, marker: str) -> Parsing[bool]:
        if marker != "{":
            return (yield from super()._read_calls(marker))
        if not self._at_line_start or not (yield from self._read_object(only_known=True)):
            return False
        yield from self._read_more_objects(only_known=True)
        return True

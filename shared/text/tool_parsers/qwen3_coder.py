"""Calls of Qwen3-Coder, as tags with the arguments as text:

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from shared.text.text_reader import Parsing
from shared.text.tool_parsers.call_grammar import CallGrammar, Schema, properties
from shared.text.tool_parsers.text_arguments import TextArgumentsParser
from shared.text.tool_parsers.tool_parser import Frame

FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
PARAMETER_LINE_END = f"\n{PARAMETER_END}\n"


class Qwen3CoderParser(TextArgumentsParser):
    """The model leaves out the outer tags at times, or the end of a parameter on the line before the next tag."""

    begins = ("<tool_call>", FUNCTION)
    ends = ("</tool_call>",)

    @classmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Schema) -> str:
        begin, end = grammar.opening(cls.begins[0]), grammar.marker(cls.ends[0])
        parts = [begin, grammar.text(f"\n{FUNCTION}{name}>\n")]
        for key, value, is_required in properties(schema):
            head = grammar.text(f"{PARAMETER}{key}>\n")
            pair = f"{head} {cls._argument(grammar, value, PARAMETER_LINE_END)}"
            parts.append(pair if is_required else f"({pair})?")
        return " ".join([*parts, grammar.text(f"{FUNCTION_END}\n"), end])

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        return Frame(separator=grammar.text("\n"))

    def _read_calls(self, marker: str) -> Parsing[bool]:
        reader = self._reader
        if marker != FUNCTION:
            yield from reader.skip_space()
            if not (yield from reader.literal(FUNCTION)):
                return False
        name = yield from self._read_name()
        if not name or not (yield from reader.literal(">")):
            return False
        self._begin_call(name)
        _, tag = yield from reader.text_until(PARAMETER, FUNCTION_END, *self.ends)
        while tag == PARAMETER:
            key, end = yield from reader.text_until(">")
            if not end:
                return True
            tag = yield from self._read_argument(key, PARAMETER_END, padding="\n", also_ends=(PARAMETER, FUNCTION_END))
            if tag == PARAMETER_END:
                _, tag = yield from reader.text_until(PARAMETER, FUNCTION_END, *self.ends)
        if tag:
            self._end_call()
        if tag == FUNCTION_END:
            yield from reader.skip_space()
            yield from reader.literal(*self.ends)
        return True

"""Calls of Qwen3-Coder, as tags with the arguments as text:

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from shared.text.text_reader import Steps
from shared.text.tool_parsers.text_arguments import TextArgumentsParser

FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"


class Qwen3CoderParser(TextArgumentsParser):
    """The model leaves out the outer tags at times."""

    begins = ("<tool_call>", FUNCTION)
    ends = ("</tool_call>",)

    def _read_calls(self, marker: str) -> Steps[bool]:
        reader = self._reader
        if marker != FUNCTION:
            yield from reader.skip_space()
            if not (yield from reader.literal(FUNCTION)):
                return False
        name, end = yield from reader.text_until(">", "<", "\n")
        if end != ">" or not name:
            return False
        self._begin_call(name)
        while True:
            _, tag = yield from reader.text_until(PARAMETER, FUNCTION_END, *self.ends)
            if tag != PARAMETER:
                break
            key, end = yield from reader.text_until(">")
            if not end or not (yield from self._read_argument(key, PARAMETER_END, padding="\n")):
                return True
        if tag:
            self._end_call()
        if tag == FUNCTION_END:
            yield from reader.skip_space()
            yield from reader.literal(*self.ends)
        return True

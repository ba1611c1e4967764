"""Calls of GLM 4.5 to 4.7, as a name and pairs of tags. The later models leave out the newlines:

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

from shared.text.text_reader import Steps
from shared.text.tool_parsers.text_arguments import TextArgumentsParser

KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class Glm45Parser(TextArgumentsParser):
    """Each call has tags of its own."""

    begins = ("<tool_call>",)
    ends = ("</tool_call>",)
    frames = (KEY, KEY_END, VALUE, VALUE_END)

    def _read_calls(self, marker: str) -> Steps[bool]:
        reader = self._reader
        yield from reader.skip_space()
        name, tag = yield from reader.text_until(KEY, *self.ends, "\n")
        name = name.strip()
        if not tag or not name or " " in name:
            return False
        self._begin_call(name)
        while True:
            if tag == "\n":
                _, tag = yield from reader.text_until(KEY, *self.ends)
            if tag != KEY:
                break
            key, key_end = yield from reader.text_until(KEY_END)
            _, value = yield from reader.text_until(VALUE)
            if not key_end or not value or not (yield from self._read_argument(key.strip(), VALUE_END)):
                return True
            tag = "\n"
        if tag:
            self._end_call()
        return True

"""Calls of Mistral's models, in the forms of three generations of their tokenizers:

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]
[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]...
[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}[TOOL_CALLS]...
"""

import re
import secrets
import string

from shared.text.text_reader import Parsing
from shared.text.tool_parsers.call_grammar import CallGrammar, Schema
from shared.text.tool_parsers.json_calls import JsonCallParser
from shared.text.tool_parsers.tool_parser import Frame

ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # as the models' templates demand of the calls in a history

_ID = re.compile(r"[a-zA-Z0-9]*")


class MistralParser(JsonCallParser):
    """A name follows the marker, or a list of calls."""

    begins = ("[TOOL_CALLS]",)
    frames = ("[CALL_ID]", "[ARGS]")

    @classmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Schema) -> str:
        if not grammar.has_token("[ARGS]"):
            return cls._object(grammar, name, schema)
        begin, arguments = grammar.opening(cls.begins[0]), grammar.marker("[ARGS]")
        return f"{begin} {grammar.text(name)} {arguments} {grammar.object(schema)}"

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        """Return what is around a list of calls, which older vocabularies have instead of the marker [ARGS]."""
        if grammar.has_token("[ARGS]"):
            return Frame()
        return Frame(f"{grammar.opening(cls.begins[0])} {grammar.text('[')}", grammar.text(", "), grammar.text("]"))

    def _read_calls(self, marker: str) -> Parsing[bool]:
        reader = self._reader
        yield from reader.skip_space()
        while (yield from reader.literal(marker)):  # whose bracket is no list's
            yield from reader.skip_space()
        if (yield from reader.peek()) in ("[", "{"):
            return (yield from super()._read_calls(marker))
        name, id = (yield from self._read_name()), ""
        if name and (yield from reader.literal("[CALL_ID]")):
            id = yield from reader.matching(_ID)
        yield from reader.literal("[ARGS]")
        yield from reader.skip_space()
        if not name or (yield from reader.peek()) != "{":
            return False
        self._begin_call(name, id if len(id) == ID_LENGTH else None)
        if (yield from self._read_arguments()):
            yield from self._read_end()
        return True

    def _new_id(self) -> str:
        return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))

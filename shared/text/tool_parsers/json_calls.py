"""Reads calls whose arguments are JSON, which is passed on as it comes, as the model wrote it.

Many families write a whole call as an object with a name and arguments: `{"name": "f", "arguments": {...}}`.
"""

import json

from shared.text.text_reader import Steps
from shared.text.tool_parsers.argument_types import without_surrogates
from shared.text.tool_parsers.call_grammar import CallGrammar, Schema
from shared.text.tool_parsers.tool_parser import ToolParser

ARGUMENTS_KEYS = ("arguments", "parameters")
KEYS = ("name", "type", "id", *ARGUMENTS_KEYS)
SEPARATORS = " \t\r\n;,"


class JsonCallParser(ToolParser):
    """Reads calls with arguments in JSON."""

    @classmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Schema) -> str:
        return cls._object(grammar, name, schema)

    @staticmethod
    def _object(grammar: CallGrammar, name: str, schema: Schema, key: str = "arguments") -> str:
        """Return the expression for a call as an object."""
        begin = grammar.text(f'{{"name": {json.dumps(name)}, {json.dumps(key)}: ')
        return f"{begin} {grammar.object(schema)} {grammar.text('}')}"

    def _read_json_calls(self, *, only_known: bool = False) -> Steps[bool]:
        """Read one or more calls, or a list of them. Return whether there was one, or an empty list.

        If `only_known`, an object is a call only if it has no other keys than calls have, and names a tool.
        """
        yield from self._reader.skip_space()
        is_list = bool((yield from self._reader.literal("[")))
        num_before = self.num_calls
        yield from self._reader.skip_space()
        while (yield from self._read_next_object(only_known)):
            yield from self._reader.skip(SEPARATORS)
        is_closed = is_list and (yield from self._reader.literal("]"))
        return bool(is_closed) or self.num_calls > num_before

    def _read_next_object(self, only_known: bool) -> Steps[bool]:
        """Read a call if one comes next. Return whether one began; if an object is none, set the cursor back."""
        start = self._reader.position
        if not (yield from self._reader.literal("{")):
            return False
        if not (yield from self._read_object(only_known)):
            self._reader.position = start
            return False
        return True

    def _read_object(self, only_known: bool) -> Steps[bool]:
        """Read a call behind its first brace. Return whether one began."""
        reader = self._reader
        name, arguments, is_closed = "", None, False
        while True:
            yield from reader.skip(SEPARATORS)
            if is_closed := bool((yield from reader.literal("}"))):
                break
            key = yield from self._read_key()
            if key is None or (only_known and key not in KEYS):
                break
            if key == "name":
                name = _text((yield from reader.json_text()))
                if not name or (only_known and name not in self._tools):
                    break
            elif key not in ARGUMENTS_KEYS:
                yield from reader.json_text()
            elif not name:  # which comes later
                arguments = yield from reader.json_text()
            else:
                self._begin_call(name)
                yield from self._read_arguments()
                yield from self._read_object_end()
                return True
        if not name or (only_known and name not in self._tools):
            return False
        self._begin_call(name)
        if is_closed:
            self._add_arguments(_as_object(arguments))
            self._end_call()
        return True

    def _read_key(self) -> Steps[str | None]:
        """Read a key and the colon behind it. Return None if there is none."""
        if (yield from self._reader.peek()) != '"':
            return None
        key = _text((yield from self._reader.json_text()))
        yield from self._reader.skip_space()
        if not (yield from self._reader.literal(":")):
            return None
        yield from self._reader.skip_space()
        return key

    def _read_object_end(self) -> Steps[None]:
        """Read what follows the arguments in a call's object."""
        while True:
            yield from self._reader.skip(SEPARATORS)
            if (yield from self._reader.literal("}")) or (yield from self._read_key()) is None:
                return
            yield from self._reader.json_text()

    def _read_arguments(self) -> Steps[None]:
        """Read the arguments of the call that has begun, to their end, and end the call.

        If they are broken, what follows up to the call's end marker counts as a part of them.
        """
        yield from self._reader.skip_space()
        if (yield from self._reader.peek()) in ("{", "["):
            if (yield from self._reader.json_value(self._add_arguments)):
                self._end_call()
            elif self.ends:
                yield from self._reader.until(self.ends, self._add_arguments)
            return
        value = yield from self._reader.json_text()
        if (yield from self._reader.peek()):  # otherwise the output was cut off
            self._add_arguments(_as_object(value))
            self._end_call()


def _as_object(value: str | None) -> str:
    """Return arguments as an object. Some models write none, null, or a string with the object's JSON."""
    if value is None or value in ("", "null"):
        return "{}"
    return (_text(value) or "{}") if value.startswith('"') else value


def _text(value: str | None) -> str:
    """Return the string in JSON; '' if it is none."""
    try:
        text = json.loads(value or '""', strict=False)
    except ValueError:
        return ""
    return without_surrogates(text) if isinstance(text, str) else ""

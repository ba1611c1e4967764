"""Reads calls whose arguments are JSON, which is passed on as it comes, as the model wrote it.

Many families write a whole call as an object with a name and arguments: `{"name": "f", "arguments": {...}}`.
"""

import json

from shared.text.text_reader import Parsing
from shared.text.tool_parsers.argument_types import UNREADABLE, without_surrogates
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

    def _read_calls(self, marker: str) -> Parsing[bool]:
        """Read one or more calls, or a list of them. Return whether there was one, or an empty list."""
        reader = self._reader
        yield from reader.skip_space()
        is_list = bool((yield from reader.literal("[")))
        yield from reader.skip_space()
        is_call = (yield from reader.literal("{")) and (yield from self._read_object())
        if is_call:
            yield from self._read_more_objects()
        if not is_call and not (is_list and (yield from reader.literal("]"))):
            return False
        yield from self._read_end()
        return True

    def _read_more_objects(self, *, only_known: bool = False) -> Parsing[None]:
        """Read the calls that follow one. An object that is no call is content, and ends them."""
        reader = self._reader
        while not self._call_is_open:
            yield from reader.skip(SEPARATORS + "}")
            reader.release()
            if not (yield from reader.literal("{")):
                return
            if not (yield from self._read_object(only_known=only_known)):
                self._add_text(reader.unreleased())
                reader.release()
                return

    def _read_end(self, surplus: str = " \t\r\n}]") -> Parsing[None]:
        """Read the end marker of a call, and the brackets that models write too many of before it."""
        yield from self._reader.skip(surplus)
        yield from self._reader.literal(*self.ends)

    def _read_object(self, *, only_known: bool = False) -> Parsing[bool]:
        """Read a call behind its first brace. Return whether one began.

        If `only_known`, an object is a call only if it names a tool, and has no other keys than calls have before its
        arguments.
        """
        reader = self._reader
        name, arguments, is_closed = "", None, False
        while True:
            yield from reader.skip(SEPARATORS)
            if is_closed := bool((yield from reader.literal("}"))):
                break
            key = yield from self._read_key()
            if key is None:
                break
            if only_known and key not in KEYS:
                return False
            if key == "name":
                name = _text((yield from reader.json_text()))
                if not name or (only_known and name not in self._tools):
                    break
            elif key not in ARGUMENTS_KEYS:
                yield from reader.json_value(_ignore)
            elif not name:  # which comes later
                arguments = yield from reader.json_text()
            else:
                self._begin_call(name)
                if (yield from self._read_arguments()):
                    yield from self._read_object_end()
                return True
        if not name or (only_known and name not in self._tools):
            return False
        if only_known and not is_closed and (yield from reader.peek()):  # otherwise the output was cut off
            return False
        self._begin_call(name)
        if is_closed:
            self._add_arguments(_as_object(arguments))
            self._end_call()
        return True

    def _read_key(self) -> Parsing[str | None]:
        """Read a key and the colon behind it. Return None if there is none."""
        if (yield from self._reader.peek()) != '"':
            return None
        key = _text((yield from self._reader.json_text()))
        yield from self._reader.skip_space()
        if not (yield from self._reader.literal(":")):
            return None
        yield from self._reader.skip_space()
        return key

    def _read_object_end(self) -> Parsing[None]:
        """Read what follows the arguments in a call's object."""
        while True:
            yield from self._reader.skip(SEPARATORS)
            if (yield from self._reader.literal("}")) or (yield from self._read_key()) is None:
                return
            yield from self._reader.json_value(_ignore)

    def _read_arguments(self) -> Parsing[bool]:
        """Read the arguments of the call that has begun, and end the call. Return whether they came to their end.

        If they are broken, what follows up to the call's end marker counts as a part of them.
        """
        yield from self._reader.skip_space()
        if (yield from self._reader.peek()) in ("{", "["):
            if not (yield from self._reader.json_value(self._add_arguments)):
                if self.ends:
                    yield from self._reader.until(self.ends, self._add_arguments)
                return False
        else:
            value = yield from self._reader.json_text()
            if not (yield from self._reader.peek()):  # the output was cut off
                return False
            self._add_arguments(_as_object(value))
        self._end_call()
        return True


def _ignore(text: str) -> None:
    pass


def _as_object(value: str | None) -> str:
    """Return arguments as an object. Some models write none, null, or a string with the object's JSON."""
    if value is None or value in ("", "null"):
        return "{}"
    return (_text(value) or "{}") if value.startswith('"') else value


def _text(value: str | None) -> str:
    """Return the string in JSON; '' if it is none."""
    try:
        text = json.loads(value or '""', strict=False)
    except UNREADABLE:
        return ""
    return without_surrogates(text) if isinstance(text, str) else ""

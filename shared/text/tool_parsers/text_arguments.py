"""Writes the arguments of calls whose format gives them one by one, as text, so that they become one JSON object.

An argument that is a string is passed on as it comes; others when they are complete, since their type shows then.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from shared.text.text_reader import Parsing
from shared.text.tool_parsers.argument_types import (
    argument_types,
    convert,
    is_only_string,
    types_of,
    without_surrogates,
)
from shared.text.tool_parsers.call_grammar import CallGrammar, Schema
from shared.text.tool_parsers.tool_parser import ToolParser, Tools


class TextArgumentsParser(ToolParser):
    """Reads calls whose arguments are texts between markers."""

    def __init__(self, tools: Tools, special: Collection[str] = ()) -> None:
        super().__init__(tools, special)
        self._call_name = ""
        self._names: set[str] = set()  # of the arguments of the call so far

    @staticmethod
    def _argument(grammar: CallGrammar, schema: Schema, end: str) -> str:
        """Return the expression for an argument's text and what ends it.

        Of a string's schema only a list of values is in it, as expressions for JSON do not fit plain text.
        """
        if not is_only_string(types_of(schema)):
            return f"{grammar.json(schema)} {grammar.marker(end)}"
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not isinstance(values, list) or not values:
            return grammar.until(end)
        return f"({' | '.join(grammar.text(str(value)) for value in values)}) {grammar.marker(end)}"

    def _begin_call(self, name: str, id: str | None = None) -> None:
        self._call_name, self._names = name, set()
        super()._begin_call(name, id)

    def _end_call(self) -> None:
        self._add_arguments("}" if self._names else "{}")
        super()._end_call()

    def _add_argument(self, name: str, value: Any) -> None:
        self._begin_argument(name)
        self._add_arguments(_json(value))

    def _begin_argument(self, name: str) -> None:
        self._add_arguments((", " if self._names else "{") + _json(name) + ": ")
        self._names.add(name)

    def _types(self, name: str) -> frozenset[str]:
        """Return the types of the call's argument `name`; empty if the schema does not say."""
        return argument_types(self._tools.get(self._call_name, {}), name)

    def _read_argument(self, name: str, end: str, *, padding: str = "", also_ends: Sequence[str] = ()) -> Parsing[str]:
        """Read the text of an argument up to `end`. Return the marker that ended it, or '' at the end of the output.

        One `padding` behind the beginning and one before the end are not part of the text. Behind such, one of
        `also_ends` ends it too. Of several arguments of one name the first counts, since JSON has a name once.
        """
        ends = [padding + marker for marker in (end, *also_ends)]
        if padding:
            ends.append(end)
        if padding:
            yield from self._reader.literal(padding)
        if name not in self._names and is_only_string(self._types(name)):
            self._begin_argument(name)
            return (yield from self._read_string(ends)).removeprefix(padding)
        text, marker = yield from self._reader.text_until(*ends)
        if marker and name not in self._names:
            self._add_argument(name, convert(text, self._types(name)))
        return marker.removeprefix(padding)

    def _read_string(self, ends: Sequence[str]) -> Parsing[str]:
        def show(piece: str) -> None:
            self._add_arguments(_json(piece)[1:-1])

        self._add_arguments('"')
        marker = yield from self._reader.until(ends, show, drop_partial=True)
        if marker:
            self._add_arguments('"')
        return marker


def _json(value: Any) -> str:
    return without_surrogates(json.dumps(value, ensure_ascii=False))

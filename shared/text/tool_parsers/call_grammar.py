"""`CallGrammar`: builds a grammar of a family's calls, with arguments by the tools' schemas.

It is in llguidance's dialect of Lark. A grammar describes one way of writing that the family's parser reads, the one
that its template prints.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import InvalidRequest, brief
from shared.text.json_schemas import closed, joins_schemas, without_annotations
from shared.text.lark import ANY_TEXT, LarkRules

OPTIONS = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""JSON as templates print it. With any white space, a model could write that without end."""

Schema = Mapping[str, Any]


class CallGrammar(LarkRules):
    """Collects the rules of a grammar of calls. `token_ids` are those of markers that are tokens of their own.

    If `in_text`, calls may be left out, and there may be any text before, between and behind them.
    """

    def __init__(self, token_ids: Mapping[str, int], *, in_text: bool = False) -> None:
        super().__init__(token_ids)
        self._in_text = in_text

    def opening(self, marker: str) -> str:
        """Return an expression for the marker that opens calls, with the text before it if there may be some."""
        return self.until(marker) if self._in_text else self.marker(marker)

    def object(self, schema: Schema) -> str:
        """Return an expression for an object by a schema of parameters. Without one it is empty."""
        return self.json({"type": "object"} | (dict(schema) or {"additionalProperties": False}))

    def json(self, schema: Schema) -> str:
        """Return an expression for JSON by a schema, with the properties that it names and no others.

        Raise `InvalidRequest` if it is nested too deeply.
        """
        try:
            schema = schema if joins_schemas(schema) else closed(schema)
            text = json.dumps(without_annotations(schema) | OPTIONS, ensure_ascii=False)
        except (RecursionError, InvalidRequest) as error:
            raise InvalidRequest("tools: a schema is nested too deeply", "tools") from error
        return self.rule(f"%json {text}")

    def in_lines(
        self, lines: Sequence[tuple[str, str]], calls: Sequence[str], marker: str = "", *, parallel: bool
    ) -> str:
        """Return the grammar of any text in which a line that begins like a call is one.

        Each of `lines` is a regular expression for a call's beginning, and an expression for the rest, which may refer
        to one of `calls` as "call". Calls may also follow one another, and `marker`, if there is one.
        """
        first, others = [], []
        for opening, rest in lines:
            behind_text, behind_call = rf"/((.|\n)*\n)?\s*{opening}/", rf"/[\s;,}}]*{opening}/"
            first.append(f"{self.rule(behind_text, '[lazy]')} {rest}")
            others.append(f"{self.rule(behind_call, '[lazy]')} {rest}")
        other = f"({' | '.join(others)})"
        if marker:
            first.append(f"{self.until(marker)} {other}")
        start = f"(({' | '.join(first)}) {other}*)*" if parallel else f"({' | '.join(first)})?"
        return self.of(f"{start} {ANY_TEXT}", f"call: {' | '.join(calls)}")

    def finish(self, begin: str, calls: Sequence[str], separator: str, end: str, *, parallel: bool) -> str:
        """Return the grammar of one of `calls`, or of several if `parallel`, between two expressions."""
        start = f"{begin} call ({separator} call)* {end}" if parallel else f"{begin} call {end}"
        if self._in_text:
            start = f"({start}){'*' if parallel else '?'} {ANY_TEXT}"
        return self.of(start, f"call: {' | '.join(calls)}")


def properties(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Return the properties of an object's schema: name, schema, and whether it must be there.

    Raise `InvalidRequest` if it is none.
    """
    required, listed = schema.get("required") or (), schema.get("properties") or {}
    if not isinstance(listed, Mapping) or not isinstance(required, (list, tuple)):
        raise InvalidRequest(f"tools: properties or required of a schema are wrong: {brief(schema)}", "tools")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return [(name, _as_object(value) | shared, name in required) for name, value in listed.items()]


def _as_object(schema: Any) -> dict[str, Any]:
    """Return a schema as an object, since `true` and `false` are schemas too."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"tools: a schema must be an object, got {brief(schema)}", "tools")
    return dict(schema)

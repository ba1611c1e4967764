"""`CallGrammar`: builds a grammar of a family's calls, with arguments by the tools' schemas.

It is in llguidance's dialect of Lark, for an engine that makes a model call a tool, or keep to the format once a call
has begun. A grammar describes one way of writing that the family's parser reads, the one that its template prints.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

OPTIONS = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""JSON as templates print it. With any white space, a model could write that without end."""

Schema = Mapping[str, Any]


class CallGrammar:
    """Collects the rules of a grammar. `token_ids` are those of markers that are tokens of their own."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._rules: list[str] = []

    def has_token(self, marker: str) -> bool:
        """Return whether a marker is a token of its own."""
        return marker in self._token_ids

    def marker(self, text: str) -> str:
        """Return an expression for a marker: its token if it is one, or else its text."""
        id = self._token_ids.get(text)
        return self.text(text) if id is None else f"<[{id}]>"

    def text(self, text: str) -> str:
        """Return an expression for a text, which is empty for no text."""
        return json.dumps(text, ensure_ascii=False) if text else ""

    def object(self, schema: Schema) -> str:
        """Return an expression for an object by a schema of parameters. Without one it is empty."""
        return self.json({"type": "object"} | (dict(schema) or {"additionalProperties": False}))

    def json(self, schema: Schema) -> str:
        """Return an expression for JSON by a schema."""
        return self._rule("%json " + json.dumps(dict(schema) | OPTIONS, ensure_ascii=False))

    def until(self, end: str) -> str:
        """Return an expression for any text up to the marker `end`, and that."""
        if self.has_token(end):
            return rf"/(.|\n)*/ {self.marker(end)}"
        return self._rule(r"/(.|\n)*/", f"[suffix={self.text(end)}]")

    def finish(self, begin: str, calls: Sequence[str], separator: str, end: str, *, parallel: bool) -> str:
        """Return the grammar of one of `calls`, or of several if `parallel`, between two expressions."""
        start = f"{begin} call ({separator} call)* {end}" if parallel else f"{begin} call {end}"
        return "\n".join([f"start: {start}", "call: " + " | ".join(calls), *self._rules]) + "\n"

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name


def properties(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Return the properties of an object's schema: name, schema, and whether it must be there."""
    required = schema.get("required") or ()
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    listed = schema.get("properties") or {}
    return [(name, dict(value) | shared, name in required) for name, value in listed.items()]

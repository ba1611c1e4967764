"""`StructuredOutputsParams`: what a user demands of an output's form. `shared.text.grammars` compiles it."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from shared.errors import InvalidRequest, brief

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("json_object", bool, "true or false"),
    ("disable_any_whitespace", bool, "true or false"),
    ("disable_additional_properties", bool, "true or false"),
    ("whitespace_pattern", str, "a text"),
)
"""Fields with their types, in Python and in words."""


class StructuredOutputsParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One demand on an output's form. Raise `InvalidRequest` if there are several, or none, or for an option of a wrong
    type. What is demanded is checked when it becomes a grammar.

    `json` is a JSON schema, as an object or as its text. `grammar` is in Lark's or GBNF's notation. `structural_tag`
    has tags, within which the text follows a schema, and the triggers that begin them. The last three fields are of
    JSON.
    """

    json: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None  # False is the same as None
    structural_tag: Mapping[str, Any] | str | None = None
    disable_any_whitespace: bool = False  # no whitespace between tokens
    disable_additional_properties: bool = False  # objects have only the properties that the schema names
    whitespace_pattern: str | None = None  # a regular expression for the whitespace between tokens

    def __post_init__(self) -> None:
        for name, kind, words in OPTIONS:
            value = getattr(self, name)
            if not isinstance(value, kind | None):
                raise InvalidRequest(
                    f"structured_outputs: {name} must be {words}, got {brief(value)}", "structured_outputs"
                )
        if len(self._kinds) != 1:
            found = " and ".join(self._kinds) or "none"
            raise InvalidRequest(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, got {found}", "structured_outputs"
            )

    @property
    def kind(self) -> str:
        """Return the name of the field that is set."""
        return self._kinds[0]

    @property
    def _kinds(self) -> list[str]:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        return [kind for kind in kinds if kind != "json_object" or self.json_object]

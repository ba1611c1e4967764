"""Writes grammars in Lark's notation, in llguidance's dialect of it."""

import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance

from shared.errors import InvalidRequest, brief

MAX_LENGTH = 64 * 1024
"""Maximum number of bytes of a grammar. It travels with its request, and with its sequence to the worker."""

MAX_GBNF_LENGTH = 8 * 1024
"""The same for GBNF's notation, which Python code converts in a time that grows faster than its length."""

MAX_RULES = 500
"""Maximum number of rules of a grammar in Lark's notation."""

WHITESPACE = r"[ \n\r\t]{1,32}"
"""Whitespace between the tokens of JSON. It has a bound, since a model may like to go on with it without end."""

ANY_TEXT = r"/(.|\n)*/"
"""An expression for any text without tokens of their own."""


class LarkRules:
    """Collects the rules of a grammar. `token_ids` are those of markers that are tokens of their own."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._rules: dict[str, str] = {}  # name and attributes, by the body

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

    def until(self, end: str, *others: str, free: str = ANY_TEXT) -> str:
        """Return an expression for text, which `free` matches, up to the first of several markers, and that.

        A marker is found as its token or spelled.
        """
        ends = (end, *others)
        spelled = self.rule(f"{free} ({' | '.join(map(self.text, ends))})", "[lazy]")
        tokens = [f"{free} {self.marker(end)}" for end in ends if self.has_token(end)]
        return f"({' | '.join([*tokens, spelled])})" if tokens else spelled

    def rule(self, body: str, attributes: str = "") -> str:
        """Return the name of a rule with this body."""
        name = self._rules.setdefault(body, f"rule{len(self._rules)}{attributes}")
        return name.removesuffix(attributes)

    def terminal(self, body: str) -> str:
        """Return the name of a rule that is one regular expression, which may have `&` and `~`."""
        return self._rules.setdefault(body, f"TERMINAL{len(self._rules)}")

    def of(self, start: str, *rules: str) -> str:
        """Return the grammar that begins with the expression `start`, with these rules and those that were made."""
        own = [f"{name}: {body}" for body, name in self._rules.items()]
        return "\n".join([f"start: {start}", *rules, *own]) + "\n"


def join_grammars(start: str, parts: Mapping[str, str]) -> str:
    """Return the grammar `start`, which refers to grammars of their own as "@" and the name in `parts`."""
    grammars: list[dict[str, Any]] = [{"name": "message", "lark_grammar": start}]
    for name, text in parts.items():
        first, *others = _grammars(text)
        grammars += [first | {"name": name}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _grammars(text: str) -> list[dict[str, Any]]:
    """Return the grammars in a text, which is JSON with a list of them, or one in Lark's notation."""
    if not text.startswith("{"):
        return [{"lark_grammar": text}]
    grammars: list[dict[str, Any]] = json.loads(text)["grammars"]
    return grammars


def lark_grammar(text: str, param: str) -> str:
    """Return a grammar in Lark's notation, also if it is in GBNF's, whose rules begin with a name and `::=`.

    Raise `InvalidRequest`, naming `param`, if it is too long or cannot be converted.
    """
    is_gbnf = _GBNF_RULE.search(text) is not None
    if is_gbnf:
        check_length(text, param, MAX_GBNF_LENGTH)
    elif (num_rules := text.count(":")) > MAX_RULES:
        raise InvalidRequest(f"{param} must have at most {MAX_RULES} rules, got {num_rules}", param)
    try:
        return llguidance.grammar_from("grammar", _without_library_faults(text) if is_gbnf else text)
    except ValueError as error:
        raise InvalidRequest(f"{param} is not a grammar: {first_lines(str(error))}", param) from error


_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

_GBNF_PART = re.compile(
    # Texts, sets of characters, comments, and repetitions that are repeated. What has no end goes on to that of the
    # grammar, since looking for it again and again would take long.
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|#[^\r\n]*|[*+?}](?=[\s)]*\)\s*[*+?{])',
    re.DOTALL,
)

_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _without_library_faults(text: str) -> str:
    """Return a grammar in GBNF's notation as the library converts it to the right one in Lark's.

    It drops the parentheses around a repetition that stands alone, and so writes `("a"{2}){3}` as `"a"{2,2}{3,3}`: an
    empty text behind the inner repetition keeps them. It also drops the zeros of `\\u00e9`, so the character itself is
    there.
    """

    def mended(part: re.Match[str]) -> str:
        if part[0][0] in '"[':
            return _GBNF_ESCAPE.sub(_character, part[0])
        return part[0] if part[0][0] == "#" else part[0] + ' ""'

    return _GBNF_PART.sub(mended, text)


def _character(escape: re.Match[str]) -> str:
    """Return the character that an escape has by its number; below 128 as `\\x41`, since it may have a meaning."""
    if not (digits := escape[1] or escape[2]):
        return escape[0]
    number = int(digits, 16)
    return chr(number) if number >= 0x80 else f"\\x{number:02x}"


def schema_text(schema: Any, param: str) -> str:
    """Return a JSON schema as JSON. Raise `InvalidRequest`, naming `param`, if it is none, or nested too deeply."""
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequest(f"{param} must be a JSON schema, an object, got {brief(schema)}", param)
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not a JSON schema: {brief(str(error))}", param) from error


def as_object(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """Return a schema as an object: `true` is any JSON, as {} is."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    return dict(schema)


def check_length(text: str, param: str, limit: int = MAX_LENGTH) -> None:
    """Raise `InvalidRequest` if `text` has more than `limit` bytes."""
    if (length := len(text.encode(errors="replace"))) > limit:
        raise InvalidRequest(f"{param} must have at most {limit} bytes, got {length}", param)


WRONG_SCHEMA = "failed to compile JSON schema: "
"""How the library begins to say what is wrong with a schema in a grammar."""

_SOURCE_LINE = re.compile(r" +\d+ \| | +\^$")


def without_source(error: str) -> str:
    """Return an error of a schema in a grammar without the lines of that, which the schema's author has not written."""
    lines = [line for line in error.split("\n") if not _SOURCE_LINE.match(line)]
    return re.sub(rf"at \d+\(\d+\): {WRONG_SCHEMA}", "", "\n".join(lines))


def first_lines(error: str) -> str:
    """Return what an error of the library says, without the state that it adds."""
    return error.partition("\n<")[0].strip()[:500]

"""Translates structural tags into grammars: descriptions of outputs in which free text and structured parts take turns.

There are two forms, both vLLM's: a tree of formats, each of which matches a part of the text, and the older list of
tags with the triggers that begin them, which is one of these formats. Formats are those of xgrammar, but for those that
count tokens or write a schema as XML.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from llguidance import regex_to_lark
from msgspec import Meta, Struct

from shared.errors import InvalidRequest, brief
from shared.text.json_schemas import without_annotations
from shared.text.lark import (
    ANY_TEXT,
    WHITESPACE,
    LarkRules,
    as_object,
    check_length,
    join_grammars,
    lark_grammar,
    schema_text,
)

MAX_DEPTH = 32
"""Maximum number of formats within one another."""

MAX_FORMATS = 1000
"""Maximum number of formats. An expression is written for each, and some twice."""

Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class ConstString(Struct, frozen=True, tag="const_string", forbid_unknown_fields=True):
    value: Text


class JsonSchema(Struct, frozen=True, tag="json_schema", forbid_unknown_fields=True):
    json_schema: dict[str, Any] | bool


class Grammar(Struct, frozen=True, tag="grammar", forbid_unknown_fields=True):
    grammar: Text


class Regex(Struct, frozen=True, tag="regex", forbid_unknown_fields=True):
    pattern: Text


class AnyText(Struct, frozen=True, tag="any_text", forbid_unknown_fields=True):
    excludes: list[Text] = []
    max_chars: Count | None = None


class SequenceOf(Struct, frozen=True, tag="sequence", forbid_unknown_fields=True):
    elements: Annotated[list["Format"], Meta(min_length=1)]


class Or(Struct, frozen=True, tag="or", forbid_unknown_fields=True):
    elements: Annotated[list["Format"], Meta(min_length=1)]


class Optional(Struct, frozen=True, tag="optional", forbid_unknown_fields=True):
    content: "Format"


class Plus(Struct, frozen=True, tag="plus", forbid_unknown_fields=True):
    content: "Format"


class Star(Struct, frozen=True, tag="star", forbid_unknown_fields=True):
    content: "Format"


class Repeat(Struct, frozen=True, tag="repeat", forbid_unknown_fields=True):
    content: "Format"
    min: Annotated[int, Meta(ge=0, le=1000)]
    max: Annotated[int, Meta(ge=-1, le=1000)]  # -1: any number


class Tag(Struct, frozen=True, tag="tag", forbid_unknown_fields=True):
    begin: str
    content: "Format"
    end: str | Annotated[list[str], Meta(min_length=1)]

    @property
    def ends(self) -> list[str]:
        return [self.end] if isinstance(self.end, str) else self.end


class TriggeredTags(Struct, frozen=True, tag="triggered_tags", forbid_unknown_fields=True):
    triggers: Texts
    tags: Annotated[list[Tag], Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[Text] = []


class TagsWithSeparator(Struct, frozen=True, tag="tags_with_separator", forbid_unknown_fields=True):
    tags: Annotated[list[Tag], Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonSchema
    | Grammar
    | Regex
    | AnyText
    | SequenceOf
    | Or
    | Optional
    | Plus
    | Star
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class StructuralTag(Struct, frozen=True):
    format: Format


def structural_tag_grammar(value: Any, param: str, token_ids: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag in one of its forms. Raise `InvalidRequest`, naming `param`.

    `token_ids` are the ids of texts that are tokens of their own.
    """
    tree = _tree(value, param)
    _check_size(tree, param)
    try:
        structural_tag = msgspec.convert({"format": tree}, StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{param}: {str(error).replace('$.', '')}", param) from error
    return _Translator(param, token_ids).grammar(structural_tag.format)


def _tree(value: Any, param: str) -> Any:
    """Return the tree of formats of a structural tag."""
    if isinstance(value, Mapping):
        check_length(schema_text(value, param), param)
    if isinstance(value, Mapping) and "format" in value:
        if unknown := value.keys() - {"format", "type"}:
            raise InvalidRequest(f"{param} has unknown fields: {brief(sorted(map(str, unknown)))}", param)
        return value["format"]
    if not isinstance(value, Mapping) or not isinstance(value.get("structures"), list):
        raise InvalidRequest(f"{param} must have a format, or structures and triggers, got {brief(value)}", param)
    tags = [_tag(structure, param) for structure in value["structures"]]
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


def _tag(structure: Any, param: str) -> dict[str, Any]:
    """Return the tag that a structure of the older form is."""
    if not isinstance(structure, Mapping) or not structure.keys() >= {"begin", "end"}:
        raise InvalidRequest(f"{param}: a structure must have begin, schema and end, got {brief(structure)}", param)
    schema = structure.get("schema", {})
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param}: a schema is not JSON: {error}", param) from error
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]}


def _check_size(tree: Any, param: str) -> None:
    """Raise `InvalidRequest` if there are too many formats, or too many within one another."""
    number, level = 0, [tree]
    for _ in range(MAX_DEPTH):
        number += len(level)
        level = [inner for format in level if isinstance(format, Mapping) for inner in _inner(format)]
        if not level:
            break
    if level or number > MAX_FORMATS:
        limits = f"at most {MAX_FORMATS} formats, and {MAX_DEPTH} within one another"
        raise InvalidRequest(f"{param} must have {limits}", param)


def _inner(format: Mapping[str, Any]) -> Iterable[Any]:
    for name in ("elements", "tags"):
        if isinstance(value := format.get(name), list):
            yield from value
    if "content" in format:
        yield format["content"]


class _Translator:
    """Writes formats as expressions in Lark's notation. It collects the rules that these need."""

    def __init__(self, param: str, token_ids: Mapping[str, int]) -> None:
        self._param = param
        self._rules = LarkRules(token_ids)
        self._parts: dict[str, str] = {}  # grammars of their own by name
        self._tokens = re.compile("|".join(map(re.escape, sorted(token_ids, key=len, reverse=True))) or "(?!)")

    def grammar(self, format: Format) -> str:
        """Return the grammar of outputs that match `format`."""
        start = self._rules.of(self._expression(format))
        return join_grammars(start, self._parts) if self._parts else start

    def _expression(self, format: Format) -> str:
        """Return the expression for a format. One with others in it is a rule, since expressions nest only so far."""
        match format:
            case ConstString():
                return self._literal(format.value)
            case JsonSchema():
                return self._json(format.json_schema)
            case Grammar():
                name = f"part{len(self._parts)}"
                self._parts[name] = lark_grammar(format.grammar, self._param)
                return f"@{name}"
            case Regex():
                return f"/{regex_to_lark(format.pattern, '')}/"
            case AnyText():
                return self._free(format.excludes, format.max_chars)
            case SequenceOf():
                body = self._sequence(format.elements)
            case Or():
                body = " | ".join(map(self._expression, format.elements))
            case Optional():
                body = f"({self._expression(format.content)})?"
            case Plus():
                body = f"({self._expression(format.content)})+"
            case Star():
                body = f"({self._expression(format.content)})*"
            case Repeat():
                body = self._repeat(format)
            case Tag():
                body = f"{self._literal(format.begin)} {self._up_to(format.content, format.ends)}"
            case TriggeredTags():
                body = self._triggered_tags(format)
            case TagsWithSeparator():
                body = self._tags_with_separator(format)
        return self._rules.rule(body)

    def _json(self, schema: Mapping[str, Any] | bool) -> str:
        """Return the expression for JSON by a schema."""
        try:
            schema = as_object(without_annotations(schema))
        except InvalidRequest as error:
            raise InvalidRequest(f"{self._param}: {error.message}", self._param) from error
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        return self._rules.rule(f"%json {schema_text(options | schema, self._param)}")

    def _up_to(self, format: Format, ends: Sequence[str]) -> str:
        """Return the expression for a format and one of `ends` behind it, the first of which ends free text."""
        if "" not in ends:
            match format:
                case AnyText():
                    return self._until(self._free(format.excludes, format.max_chars), ends)
                case TriggeredTags():
                    return self._triggered_tags(format, ends)
                case SequenceOf():
                    return self._sequence(format.elements, ends)
        return f"{self._expression(format)} {self._either(ends)}"

    def _sequence(self, elements: Sequence[Format], ends: Sequence[str] = ()) -> str:
        """Return the expression for elements in order. The text after a free one is what ends it."""
        parts = []
        rest = list(elements)
        while len(rest) > 1:
            format = rest.pop(0)
            if not isinstance(format, (AnyText, TriggeredTags)):
                parts.append(self._expression(format))
                continue
            match rest.pop(0):
                case ConstString(value):
                    parts.append(self._up_to(format, [value]))
                case Tag(begin, content) as tag if begin:
                    parts += [self._up_to(format, [begin]), self._up_to(content, tag.ends)]
                case _:
                    words = "must be the last of a sequence, or stand before a const_string or a tag"
                    raise InvalidRequest(f"{self._param}: any_text and triggered_tags {words}", self._param)
        if rest:
            parts.append(self._up_to(rest[0], ends) if ends else self._expression(rest[0]))
        elif ends:
            parts.append(self._either(ends))
        return " ".join(parts)

    def _repeat(self, format: Repeat) -> str:
        if format.max == 0 or -1 < format.max < format.min:
            raise InvalidRequest(f"{self._param}: max of repeat must be at least 1 and at least min", self._param)
        most = "" if format.max < 0 else str(format.max)
        return f"({self._expression(format.content)}){{{format.min},{most}}}"

    def _triggered_tags(self, format: TriggeredTags, ends: Sequence[str] = ()) -> str:
        """Return the expression for text with tags, and one of `ends` behind it, if there are some."""
        free = self._free(format.excludes)
        # Each is a rule, since it is used twice, and may have others within it that are.
        rests = [self._rules.rule(self._up_to(tag.content, tag.ends)) for tag in format.tags]
        triggered = f"({' | '.join(self._by_trigger(format, free, rests))})"
        text = self._until(free, ends) if ends else free
        end = self._either(ends) if ends else ""
        if format.at_least_one:
            tags = zip(format.tags, rests, strict=True)
            first = f"({' | '.join(f'{self._literal(tag.begin)} {rest}' for tag, rest in tags)})"
            return f"{first} {end}" if format.stop_after_first else f"{first} {triggered}* {text}"
        return f"({triggered} {end} | {text})" if format.stop_after_first else f"{triggered}* {text}"

    def _by_trigger(self, format: TriggeredTags, free: str, rests: Sequence[str]) -> Iterable[str]:
        """Yield an expression for each trigger: free text, the trigger, and what follows it in one of its tags.

        `rests` are the expressions for what follows the beginning of each tag.
        """
        by_trigger: dict[str, list[str]] = {}
        for tag, rest in zip(format.tags, rests, strict=True):
            trigger = next((trigger for trigger in format.triggers if tag.begin.startswith(trigger)), None)
            if trigger is None:
                raise InvalidRequest(f"{self._param}: no trigger begins {brief(tag.begin)}", self._param)
            expression = f"{self._literal(tag.begin.removeprefix(trigger))} {rest}"
            by_trigger.setdefault(trigger, []).append(expression)
        for trigger, expressions in by_trigger.items():
            yield f"{self._until(free, [trigger])} ({' | '.join(expressions)})"

    def _tags_with_separator(self, format: TagsWithSeparator) -> str:
        tag = f"({' | '.join(map(self._expression, format.tags))})"
        several = tag if format.stop_after_first else f"({tag} ({self._literal(format.separator)} {tag})*)"
        return several if format.at_least_one else f"({several})?"

    def _free(self, excludes: Sequence[str], max_chars: int | None = None) -> str:
        """Return the expression for text that has none of `excludes`, and no tokens that are no text."""
        text = ANY_TEXT if max_chars is None else f"/(.|\\n){{0,{max_chars}}}/"
        if not excludes:
            return text
        literals = " | ".join(map(self._rules.text, excludes))
        return self._rules.terminal(f"{text} & ~({ANY_TEXT} ({literals}) {ANY_TEXT})")

    def _until(self, free: str, ends: Sequence[str]) -> str:
        """Return the expression for free text up to the first of `ends`, and that."""
        return self._rules.until(*ends, free=free)

    def _either(self, texts: Sequence[str]) -> str:
        """Return the expression for one of several texts, which may be empty."""
        some = [self._literal(text) for text in texts if text]
        expression = f"({' | '.join(some)})" if some else ""
        return f"{expression}?" if some and "" in texts else expression

    def _literal(self, text: str) -> str:
        """Return the expression for a text, in which what is a token of its own is that token."""
        parts, at = [], 0
        for found in self._tokens.finditer(text):
            parts += [self._rules.text(text[at : found.start()]), self._rules.marker(found[0])]
            at = found.end()
        parts.append(self._rules.text(text[at:]))
        return " ".join(filter(None, parts))

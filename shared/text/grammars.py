"""Grammars that an output has to follow, by the library llguidance.

A gateway turns a user's demand into the text of a grammar (`grammar_text`) and checks it; the worker compiles it to a
matcher, which says after each token which ones may come next. Both have a `GrammarCompiler`, with the same limits, so
what a gateway accepts does not fail at a worker.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLTokenizer, StructTag
from llguidance.numpy import fill_next_token_bitmask

from shared.errors import InvalidRequest, brief
from shared.structured_outputs import StructuredOutputsParams
from shared.text.tokenizer import Tokenizer

MAX_LENGTH = 256 * 1024
"""Maximum number of characters of a grammar."""

MAX_CHOICES = 10_000

MAX_COMPILE_SECONDS = 0.1
"""Maximum CPU time to compile a grammar. A worker compiles it between two steps, for which all streams wait."""

MAX_CACHED = 64
"""Compiled grammars that are kept."""

WHITESPACE = r"[ \n\r\t]{1,32}"
"""Whitespace between the tokens of JSON. It has a bound, since a model may like to go on with it without end."""

LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class GrammarCompiler:
    """Compiles grammars over the tokens of `tokenizer`. Making one takes some hundred milliseconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_ids = tokenizer.eos_token_ids  # by which an output that follows a grammar may end
        self._tokenizer = LLTokenizer(tokenizer.backend.to_str(), eos_token=list(self.eos_token_ids) or None)
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()  # at the beginning of an output, oldest first

    @property
    def mask_words(self) -> int:
        """Return the number of words of a mask, which has a bit a token."""
        return -(-self._tokenizer.vocab_size // 32)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a new matcher, at the beginning of an output. It has an error if the grammar is wrong."""
        matcher = self._matchers.pop(grammar, None) or LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        self._matchers[grammar] = matcher
        while len(self._matchers) > MAX_CACHED:
            self._matchers.popitem(last=False)
        return matcher.deep_copy()

    def check(self, grammar: str, param: str) -> None:
        """Raise `InvalidRequest`, naming `param`, if a grammar is wrong, or too large to be used."""
        if grammar in self._matchers:
            return
        if not self.eos_token_ids:
            raise InvalidRequest(f"{param} is not supported: this model has no token that ends an output", param)
        if len(grammar) > MAX_LENGTH:
            raise InvalidRequest(f"{param} must have at most {MAX_LENGTH} characters, got {len(grammar)}", param)
        began = time.thread_time()
        matcher = self.matcher(grammar)
        if not matcher.is_error():
            mask = np.empty((1, self.mask_words), np.int32)
            fill_next_token_bitmask(matcher, mask)  # some limits show only here
        seconds = time.thread_time() - began
        if not matcher.is_error() and seconds <= MAX_COMPILE_SECONDS:
            return
        del self._matchers[grammar]
        if matcher.is_error():
            raise InvalidRequest(f"{param} is not supported: {_first_lines(matcher.get_error())}", param)
        raise InvalidRequest(
            f"{param} is too complex: it takes {seconds:.2f} s to compile, and {MAX_COMPILE_SECONDS} s is the limit",
            param,
        )


def grammar_text(params: StructuredOutputsParams, param: str = "structured_outputs") -> str:
    """Return the grammar of a demand in llguidance's notation. Raise `InvalidRequest`, naming `param`.

    Whether the grammar is right is for `GrammarCompiler.check` to say.
    """
    value = getattr(params, params.kind)
    match params.kind:
        case "json":
            return _json_grammar(_parse(value, param), params, param)
        case "json_object":
            return _json_grammar({"type": "object"}, params, param)
        case "regex":
            return LLMatcher.grammar_from_regex(_text(value, param))
        case "choice":
            return _choice_grammar(value, param)
        case "grammar":
            return _grammar(_text(value, param), param)
        case _:
            return _tag_grammar(_parse(value, param), param)


def _json_grammar(schema: Any, params: StructuredOutputsParams, param: str) -> str:
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequest(f"{param} must be a JSON schema, an object, got {brief(schema)}", param)
    if params.disable_additional_properties:
        schema = _closed(schema)
    options: Any = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    # `true` is any JSON, as {} is; as options are written into the schema, it has to be an object.
    schema = {} if schema is True else {"not": {}} if schema is False else schema
    try:
        return LLMatcher.grammar_from_json_schema(dict(schema), defaults=options)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not a JSON schema: {error}", param) from error


def _closed(schema: Any) -> Any:
    """Return a schema in which each object that names properties allows no others, unless it says otherwise."""
    if isinstance(schema, Mapping):
        closed = {key: _closed(value) for key, value in schema.items()}
        if isinstance(schema.get("properties"), Mapping):
            closed.setdefault("additionalProperties", False)
        return closed
    return [_closed(value) for value in schema] if isinstance(schema, list) else schema


def _choice_grammar(choices: Any, param: str) -> str:
    if not isinstance(choices, (list, tuple)) or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest(f"{param} must be a list of strings, got {brief(choices)}", param)
    if not 0 < len(choices) <= MAX_CHOICES or "" in choices:
        rule = f"must have 1 to {MAX_CHOICES} strings that are not empty"
        raise InvalidRequest(f"{param} {rule}, got {len(choices)}", param)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def _grammar(text: str, param: str) -> str:
    """Return a grammar in Lark's notation, also if it is in GBNF's, whose rules have `::=`."""
    try:
        return llguidance.grammar_from("grammar", text)
    except ValueError as error:
        raise InvalidRequest(f"{param} is not a grammar: {_first_lines(str(error))}", param) from error


def _tag_grammar(value: Any, param: str) -> str:
    """Return the grammar of free text with tags: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    if not isinstance(value, Mapping) or not isinstance(value.get("structures"), list):
        raise InvalidRequest(f"{param} must have structures and triggers, got {brief(value)}", param)
    triggers = value.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidRequest(f"{param}: triggers must be a list of strings, got {brief(triggers)}", param)
    tags = []
    for structure in value["structures"]:
        if not isinstance(structure, Mapping) or not all(
            isinstance(structure.get(name), str) for name in ("begin", "end")
        ):
            raise InvalidRequest(f"{param}: a structure must have begin, schema and end, got {brief(structure)}", param)
        trigger = next((trigger for trigger in triggers if structure["begin"].startswith(trigger)), None)
        if trigger is None:
            raise InvalidRequest(f"{param}: no trigger begins {brief(structure['begin'])}", param)
        schema = _parse(structure.get("schema", {}), param)
        if not isinstance(schema, Mapping):
            raise InvalidRequest(f"{param}: a schema must be an object, got {brief(schema)}", param)
        tags.append(StructTag(trigger=trigger, begin=structure["begin"], grammar=dict(schema), end=structure["end"]))
    if not tags:
        raise InvalidRequest(f"{param} must have at least one structure", param)
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


def _parse(value: Any, param: str) -> Any:
    """Return a value of JSON that may have come as its text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param) from error


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a text that is not empty, got {brief(value)}", param)
    if len(value) > MAX_LENGTH:
        raise InvalidRequest(f"{param} must have at most {MAX_LENGTH} characters, got {len(value)}", param)
    return value


def _first_lines(error: str) -> str:
    """Return what an error of the library says, without the state that it adds."""
    return error.partition("\n<")[0].strip()[:500]

"""Grammars that an output has to follow, by the library llguidance.

A gateway turns what a user wants into the text of a grammar (`grammar_text`) and checks it; the worker compiles it to a
matcher, which says after each token which ones may come next. Both have a `GrammarCompiler`, with the same limits, so
what a gateway accepts can be compiled by a worker. A limit that shows only after many tokens ends that one output.
"""

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import llguidance
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask

from shared.errors import InvalidRequest, ModelError, brief
from shared.structured_outputs import StructuredOutputsParams
from shared.text.json_schemas import closed, without_annotations
from shared.text.lark import WHITESPACE, as_object, check_length, first_lines, lark_grammar, schema_text
from shared.text.structural_tags import structural_tag_grammar
from shared.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_CHOICES = 10_000
"""Maximum number of texts to choose from."""

MAX_COMPILE_SECONDS = 0.05
"""Maximum CPU time to compile a grammar. A worker compiles it beside a step, and the step may have to wait for that."""

NO_TEXT_ERROR = "NoExtensionBias"
"""The library's whole message if a grammar has no first token, such as one whose rules never end."""

MAX_CHECKED = 1024
"""Grammars that are remembered as right."""

STACK_SIZE = 256 * 1024 * 1024
"""Bytes of stack for compiling. The library calls itself for each level of a grammar, which takes some 10 kB, and does
not look how much is left. Only what is used takes memory."""

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'

SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    "[a-zA-Z0-9]{1,10}",
    *(f"{_IN_STRING}{{1,{length}}}" for length in (5, 10, 20, 30)),
    f"{_IN_STRING}+",
]
"""Expressions whose tokens are collected beforehand, since JSON often allows all of them. The library's own list lacks
the lengths 5 and 20, with which masks of strings that have a maxLength take a fifth less time, and letters and digits
alone, with which those of e-mail addresses, of some other formats and of names take half."""

LIMITS = llguidance.LLParserLimits(step_lexer_fuel=50_000, step_max_items=20_000, verbose_errors=False)


class Compiled(NamedTuple):
    """A compiled grammar: a matcher at the beginning of an output, and the CPU time that it took."""

    matcher: LLMatcher
    seconds: float


class GrammarCompiler:
    """Compiles grammars over the tokens of `tokenizer`, one after the other in a thread of its own.

    Making one takes up to a second.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_ids = tokenizer.eos_token_ids  # by which an output that follows a grammar may end
        added = tokenizer.backend.get_added_tokens_decoder()
        self._token_ids = {token.content: id for id, token in added.items()}
        self._tokenizer: LLTokenizer | None = None
        self._problem = ""  # why there is no `_tokenizer`
        self._checked: OrderedDict[str, str] = OrderedDict()  # grammars and what is wrong with them, oldest first
        self._thread = _thread_with_deep_stack()
        if not self.eos_token_ids:
            self._problem = "this model has no token that ends an output"
            return
        try:
            tokens = TokenizerWrapper(_TokenList(tokenizer))
            self._tokenizer = LLTokenizer(tokens, eos_token=list(self.eos_token_ids), slices=SLICES)
        except ValueError as error:
            self._problem = f"this model's tokenizer has no grammars: {error}"
            logger.warning("%s", self._problem)

    @property
    def mask_words(self) -> int:
        """Return the number of words of a mask, which has a bit a token."""
        return -(-self._ready.vocab_size // 32)

    @property
    def _ready(self) -> LLTokenizer:
        """Return the tokenizer. Raise `ModelError` if there is none."""
        if self._tokenizer is None:
            raise ModelError(self._problem)
        return self._tokenizer

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a new matcher, at the beginning of an output. It has an error if the grammar is wrong.

        Raise `ModelError` if there are no grammars for this tokenizer.
        """
        return self._thread.submit(_compile, self._ready, grammar).result().matcher

    def start(self, grammar: str, is_needed: Callable[[], bool]) -> Future[Compiled | None]:
        """Begin to compile a grammar like `matcher`, and do not wait.

        When its turn comes, the thread asks `is_needed`; if not, the result is None.
        """
        tokenizer = self._ready
        return self._thread.submit(lambda: _compile(tokenizer, grammar) if is_needed() else None)

    def compile(self, params: StructuredOutputsParams, param: str = "structured_outputs") -> str:
        """Return the grammar of `params`. Raise `InvalidRequest`, naming `param`, if it is wrong or too large."""
        grammar = grammar_text(params, param, self._token_ids)
        self.check(grammar, param)
        return grammar

    def check(self, grammar: str, param: str) -> None:
        """Raise `InvalidRequest`, naming `param`, if a grammar is wrong, or too large to be used."""
        if self._tokenizer is None:
            raise InvalidRequest(f"{param} is not supported: {self._problem}", param)
        check_length(grammar, param)
        problem = self._checked.get(grammar)
        if problem is None:
            problem = self._checked[grammar] = self._problem_of(grammar, self._tokenizer)
        self._checked.move_to_end(grammar)
        while len(self._checked) > MAX_CHECKED:
            self._checked.popitem(last=False)
        if problem:
            raise InvalidRequest(f"{param} {problem}", param)

    def _problem_of(self, grammar: str, tokenizer: LLTokenizer) -> str:
        """Return what is wrong with a grammar; empty if nothing is."""
        error, seconds = self._thread.submit(self._try, tokenizer, grammar).result()
        if error:
            message = first_lines(error)
            if message == NO_TEXT_ERROR:
                return "allows no text at all: its rules never end"
            return f"is not supported: {message}"
        if seconds > MAX_COMPILE_SECONDS:
            return f"is too complex: it takes {seconds:.2f} s to compile, and {MAX_COMPILE_SECONDS} s is the limit"
        return ""

    def _try(self, tokenizer: LLTokenizer, grammar: str) -> tuple[str, float]:
        """Compile a grammar, and take two tokens: some limits show only then. Return the error and the seconds."""
        began = time.thread_time()
        matcher = _compile(tokenizer, grammar).matcher
        mask = np.empty((1, self.mask_words), np.int32)
        for _ in range(2):
            if not matcher.is_error():
                fill_next_token_bitmask(matcher, mask)
            if not matcher.is_stopped():
                matcher.consume_token(int(np.unpackbits(mask.view(np.uint8), bitorder="little").argmax()))
        return matcher.get_error(), time.thread_time() - began


class _TokenList:
    """The tokens of a tokenizer as the library takes them: the bytes of each, whatever kind of tokenizer it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend
        size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.tokens = [tokenizer.bytes.later[id] for id in range(size)]
        self.special_token_ids = sorted(backend.get_added_tokens_decoder())  # no text matches them
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_ids[0], tokenizer.bos_token_id
        self._encode = backend.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False).ids


def _compile(tokenizer: LLTokenizer, grammar: str) -> Compiled:
    """Compile a grammar in this thread, whose stack has to be deep. Others run meanwhile: the interpreter is free."""
    began = time.thread_time()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    return Compiled(matcher, time.thread_time() - began)


def _thread_with_deep_stack() -> ThreadPoolExecutor:
    """Return an executor of one thread that has `STACK_SIZE`."""
    with _stack_size_lock:
        before = threading.stack_size(STACK_SIZE)
        try:
            executor = ThreadPoolExecutor(1, "grammars")
            executor.submit(int).result()  # starts the thread
        finally:
            threading.stack_size(before)
    return executor


_stack_size_lock = threading.Lock()


def grammar_text(
    params: StructuredOutputsParams,
    param: str = "structured_outputs",
    token_ids: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Return a grammar in llguidance's notation. Raise `InvalidRequest`, naming `param`.

    `token_ids` are the ids of texts that are tokens of their own, such as the markers of a family's calls.
    Whether the grammar is right is for `GrammarCompiler.check` to say.
    """
    value = getattr(params, params.kind)
    _check_json_options(params, param)
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
            return lark_grammar(_text(value, param), param)
        case _:
            return structural_tag_grammar(_parse(value, param), param, token_ids)


def _check_json_options(params: StructuredOutputsParams, param: str) -> None:
    """Raise `InvalidRequest` for an option of JSON where there is none."""
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(params, name) and params.kind not in ("json", "json_object"):
            raise InvalidRequest(f"{param}: {name} is for JSON, not for {params.kind}", param)


def _json_grammar(schema: Any, params: StructuredOutputsParams, param: str) -> str:
    check_length(schema_text(schema, param), param)
    options: Any = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    try:
        schema = without_annotations(closed(schema) if params.disable_additional_properties else schema)
        return LLMatcher.grammar_from_json_schema(as_object(schema), defaults=options)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not a JSON schema: {error}", param) from error


def _choice_grammar(choices: Any, param: str) -> str:
    if not isinstance(choices, (list, tuple)) or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest(f"{param} must be a list of strings, got {brief(choices)}", param)
    if not 0 < len(choices) <= MAX_CHOICES or "" in choices:
        rule = f"must have 1 to {MAX_CHOICES} strings that are not empty"
        raise InvalidRequest(f"{param} {rule}, got {len(choices)}", param)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def _parse(value: Any, param: str) -> Any:
    """Return a value of JSON that may have come as its text."""
    if not isinstance(value, str):
        return value
    check_length(value, param)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param) from error


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a text that is not empty, got {brief(value)}", param)
    check_length(value, param)
    return value

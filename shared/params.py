"""`SamplingParams`: the parameters that a user sets to sample one request.

The gateway and `quire.LLM` both make one per request. It checks itself when it is made, types included, so that a wrong
value is refused in the same words everywhere, before anything runs. `to_sampling` turns it into the wire's `Sampling`.

Whole numbers may be written as 5.0, since some clients' languages have no other numbers, or come as scalars of numpy
and torch; the struct keeps an int. Every list's length is checked before anything loops over it.
"""

import operator
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from shared.errors import InvalidRequest, brief, context_exceeded
from shared.protocol import (
    MAX_BAD_WORDS,
    MAX_CACHE_SALT,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    ReasoningLimit,
    Sampling,
    pack_token_set,
)
from shared.structured_outputs import StructuredOutputsParams
from shared.vllm_params import VllmParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_CANDIDATES = 64  # that a beam search may ask an engine for at each token, beyond what users may
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1024  # characters; a stream holds back at most as many
MAX_BAD_WORD_LENGTH = 256  # characters
MAX_ALLOWED_TOKEN_IDS = 262_144  # a vocabulary; they become a bit each, which takes some thirty milliseconds
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1

WHOLE_FIELDS = (
    "n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs",
    "truncate_prompt_tokens", "stream_interval", "best_of", "thinking_token_budget",
)  # fmt: skip
REAL_FIELDS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
BOOLEAN_FIELDS = (
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "detokenize",
    "flat_logprobs", "skip_reading_prefix_cache",
)  # fmt: skip
MAX_PATTERN_SIZE = 256  # tokens; looking for patterns of so many takes some 20 µs a token
MAX_PATTERN_COUNT = 1_000_000
MAX_THINKING_TOKENS = 2**31 - 1  # more than any context has
_ID = re.compile(r"[0-9]{1,12}")
OPTIONAL_FIELDS = frozenset(
    {"seed", "max_tokens", "logprobs", "top_logprobs", "prompt_logprobs"}
    | {"truncate_prompt_tokens", "stream_interval", "best_of", "skip_reading_prefix_cache", "thinking_token_budget"}
)


class RepetitionDetectionParams(Struct, frozen=True, kw_only=True):
    """The repetitions that end an output: `min_count` copies of a pattern, one behind the other, at its end.

    Patterns have `min_pattern_size` (0 is 1) to `max_pattern_size` tokens; with 0 of the latter none is looked for.
    Raise `InvalidRequest`, naming the field, for a value of a wrong type or range.
    """

    max_pattern_size: int | float = 0
    min_pattern_size: int | float = 0
    min_count: int | float = 0

    def __post_init__(self) -> None:
        lowest_count = 2 if self.max_pattern_size else 0
        for name, low, high in (
            ("max_pattern_size", 0, MAX_PATTERN_SIZE),
            ("min_pattern_size", 0, self.max_pattern_size),
            ("min_count", lowest_count, MAX_PATTERN_COUNT),
        ):
            field = f"repetition_detection.{name}"
            value = whole(field, getattr(self, name))
            _between(field, value, low, high)
            force_setattr(self, name, value)


OBJECT_FIELDS = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}


class SamplingParams(VllmParams, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """The sampling of one request. Raise `InvalidRequest`, naming the field, for a value of a wrong type or range.

    Scripts for vLLM change fields afterwards, so they may be assigned to. `clone` returns a copy, which is checked
    again; `LLM` uses such copies.

    `max_tokens` of None means to the end of the context. `seed` of None or -1 means unseeded. `logprobs` is the number
    of alternatives for each output token (0: only the token's own log-probability); `top_logprobs` is the chat API's
    name for the same number. With `logprob_token_ids` the alternatives are these tokens instead. `top_k` of 0 or -1 is
    off. A temperature of 0 is greedy. Keys of `logit_bias` may be strings, as in JSON; `to_sampling` checks them, since
    only the model tells which ids there are.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[Any, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    top_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # has an effect only if those are not skipped
    repetition_detection: RepetitionDetectionParams | None = None
    detokenize: bool = True  # False: outputs have token ids only; for `LLM`
    flat_logprobs: bool = False  # log-probabilities in few objects; for `LLM`
    truncate_prompt_tokens: int | None = None  # of the prompt's end, which are kept; -1: what fits; for `LLM`
    stream_interval: int | None = None  # tokens of a chunk, in a stream
    skip_reading_prefix_cache: bool | None = None  # compute all of the prompt; for `LLM`
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # tokens of reasoning, whose end is forced then; None and -1: any number

    @classmethod
    def from_optional(cls, **fields: Any) -> "SamplingParams":
        """Return parameters with these fields, in which None stands for the default."""
        optional = {name: value for name, value in fields.items() if value is not None or name in OPTIONAL_FIELDS}
        return cls(**optional)

    def clone(self) -> "SamplingParams":
        """Return a copy after a check of all fields."""
        return replace(self)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_stops()
        self._check_bias()
        self._check_allowed()
        self._check_bad_words()
        self._check_logprob_ids()
        self.check_refused()

    def _check_types(self) -> None:
        for name in WHOLE_FIELDS:
            self._set(name, whole)
        for name in REAL_FIELDS:
            self._set(name, real)
        for name in BOOLEAN_FIELDS:
            self._set(name, boolean)
        for name, kind in OBJECT_FIELDS.items():
            value = getattr(self, name)
            _check(isinstance(value, kind | None), name, f"must be a {kind.__name__}", value)

    def _set(self, name: str, convert: Any) -> None:
        """Replace a field's value by its converted one."""
        value = getattr(self, name)
        if value is not None or name not in OPTIONAL_FIELDS:
            force_setattr(self, name, convert(name, value))

    def _check_ranges(self) -> None:
        _between("n", self.n, 1, MAX_N)
        _between("temperature", self.temperature, 0.0, 2.0)
        _check(0.0 < self.top_p <= 1.0, "top_p", "must be greater than 0 and at most 1", self.top_p)
        _check(self.top_k >= -1, "top_k", "must be -1 or 0 (off), or at least 1", self.top_k)
        _between("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _between("seed", self.seed, SEED_MIN, SEED_MAX)
        if self.max_tokens is not None:
            _check(self.max_tokens >= 0, "max_tokens", "must be at least 0", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens", "must be at least 0", self.min_tokens)
        if self.max_tokens is not None:
            _check(self.min_tokens <= self.max_tokens, "min_tokens", "must be at most max_tokens", self.min_tokens)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _between(name, value, 0, MAX_LOGPROBS)
        if self.truncate_prompt_tokens is not None:
            limit = self.truncate_prompt_tokens
            _check(limit == -1 or limit >= 1, "truncate_prompt_tokens", "must be -1, or at least 1", limit)
        if self.stream_interval is not None:
            _check(self.stream_interval >= 1, "stream_interval", "must be at least 1", self.stream_interval)
        if self.thinking_token_budget is not None:
            _between("thinking_token_budget", self.thinking_token_budget, -1, MAX_THINKING_TOKENS)
        if self.best_of is not None:
            _check(
                self.best_of == self.n, "best_of", f"is supported only if it equals n, which is {self.n}", self.best_of
            )

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str):
            _check_length("stop", self.stop, MAX_STOP_STRINGS, "strings")
            _check(all(isinstance(stop, str) for stop in self.stop), "stop", "must hold strings only", self.stop)
            force_setattr(self, "stop", list(self.stop))
        for stop in self.stop_strings:
            _check(stop != "", "stop", "must not hold an empty string", stop)
            _check(len(stop) <= MAX_STOP_LENGTH, "stop", f"must hold at most {MAX_STOP_LENGTH} characters", len(stop))
        _check(self.detokenize or not self.stop_strings, "stop", "needs detokenize to be true", self.stop)
        if self.stop_token_ids is not None:
            _check_length("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "token ids")
            force_setattr(self, "stop_token_ids", [whole("stop_token_ids", token) for token in self.stop_token_ids])

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        _check(isinstance(self.logit_bias, Mapping), "logit_bias", "must map token ids to numbers", self.logit_bias)
        _check_length("logit_bias", self.logit_bias, MAX_LOGIT_BIAS, "tokens")
        biases = {
            key if isinstance(key, str) else whole("logit_bias", key): _bias(key, value)
            for key, value in self.logit_bias.items()
        }
        force_setattr(self, "logit_bias", biases)

    def _check_allowed(self) -> None:
        if self.allowed_token_ids is None:
            return
        _check_length("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, "token ids")
        _check(len(self.allowed_token_ids) > 0, "allowed_token_ids", "must not be empty", [])
        if set(map(type, self.allowed_token_ids)) != {int}:
            force_setattr(self, "allowed_token_ids", [whole("allowed_token_ids", id) for id in self.allowed_token_ids])

    def _check_bad_words(self) -> None:
        if self.bad_words is None:
            return
        _check_length("bad_words", self.bad_words, MAX_BAD_WORDS, "words")
        for word in self.bad_words:
            _check(isinstance(word, str), "bad_words", "must hold strings only", word)
            _check(word != "", "bad_words", "must not hold an empty string", word)
            rule = f"must hold words of at most {MAX_BAD_WORD_LENGTH} characters"
            _check(len(word) <= MAX_BAD_WORD_LENGTH, "bad_words", rule, len(word))

    def _check_logprob_ids(self) -> None:
        if self.logprob_token_ids is not None:
            _check_length("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS, "token ids")
            ids = [whole("logprob_token_ids", token) for token in self.logprob_token_ids]
            force_setattr(self, "logprob_token_ids", ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple, also if it is one string or None."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens are listed at each output token, or None without log-probabilities.

        With `logprob_token_ids` none are, since these stand in their place.
        """
        if self.logprob_token_ids:
            return 0
        counts = [count for count in (self.logprobs, self.top_logprobs) if count is not None]
        return max(counts, default=None)

    @property
    def max_reasoning_tokens(self) -> int | None:
        """Return `thinking_token_budget`, or None if there is no limit."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    def to_sampling(
        self,
        *,
        prompt_len: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        default_max_tokens: int | None = None,
        grammar: str = "",
        bad_words: Sequence[Sequence[int]] = (),
        reasoning_limit: ReasoningLimit | None = None,
        prompt_field: str = "prompt",
    ) -> Sampling:
        """Return the wire's form of these parameters, for a prompt of `prompt_len` tokens. `grammar` is that of
        `structured_outputs`; a token that ends a sequence also ends an output that follows one if `ignore_eos`.
        The field `bad_words` comes as `bad_words`, which are sequences of tokens, and `thinking_token_budget` as
        `reasoning_limit`.

        `max_tokens` of None becomes `default_max_tokens`, but at most the room that the prompt leaves in the context;
        without a default it becomes all of that room. An unseeded request gets a seed here, so that its noise stays the
        same if it is computed again. Raise `InvalidRequest` for token ids beyond the vocabulary, for lengths beyond the
        context, which names `prompt_field` if the prompt leaves no room, and if nothing is left that may be sampled.
        """
        for token in self.stop_token_ids or ():
            _token_in_vocabulary("stop_token_ids", token, vocab_size)
        for token in self.logprob_token_ids or ():
            _token_in_vocabulary("logprob_token_ids", token, vocab_size)
        stop_ids = dict.fromkeys(self.stop_token_ids or ())  # a set in order
        if not self.ignore_eos or grammar:
            stop_ids |= dict.fromkeys(eos_token_ids)
        unseeded = self.seed is None or self.seed == -1
        num_logprobs = self.num_logprobs
        max_tokens = self._max_tokens(prompt_len, max_model_len, default_max_tokens, prompt_field)
        rule = f"must be at most max_tokens, which is {max_tokens} for this prompt"
        _check(self.min_tokens <= max_tokens, "min_tokens", rule, self.min_tokens)
        return Sampling(
            max_tokens=max_tokens,
            seed=secrets.randbits(64) if unseeded else (self.seed or 0) % 2**64,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if 0 < self.top_k < vocab_size else 0,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._biases(vocab_size),
            min_tokens=self.min_tokens,
            stop_token_ids=list(stop_ids),
            logprobs=-1 if num_logprobs is None else num_logprobs,
            prompt_logprobs=-1 if self.prompt_logprobs is None else self.prompt_logprobs,
            grammar=grammar,
            allowed_tokens=self._allowed_tokens(vocab_size, stop_ids, bad_words),
            bad_words=[list(word) for word in bad_words],
            reasoning_limit=reasoning_limit,
            logprob_token_ids=list(dict.fromkeys(self.logprob_token_ids or ())),
        )

    def _allowed_tokens(self, vocab_size: int, stop_ids: Iterable[int], bad_words: Sequence[Sequence[int]]) -> bytes:
        """Return `allowed_token_ids` as a set of bits; empty: all are allowed."""
        if self.allowed_token_ids is None:
            return b""
        ids = set(self.allowed_token_ids)
        for extreme in (min(ids), max(ids)):  # much faster than checking each id
            _token_in_vocabulary("allowed_token_ids", extreme, vocab_size)
        banned = {word[0] for word in bad_words if len(word) == 1}
        if ids <= banned:
            raise InvalidRequest("bad_words rule out all of allowed_token_ids", "bad_words")
        if self.min_tokens and ids <= banned | set(stop_ids):
            raise InvalidRequest("all of allowed_token_ids end the output, which min_tokens forbids", "min_tokens")
        return pack_token_set(ids)

    def _biases(self, vocab_size: int) -> list[tuple[int, float]]:
        """Return `logit_bias` as (token id, bias), in order. Raise `InvalidRequest`, naming the key at fault."""
        biases = {
            _token_in_vocabulary("logit_bias", key, vocab_size): bias for key, bias in (self.logit_bias or {}).items()
        }
        return sorted(biases.items())

    def _max_tokens(self, prompt_len: int, max_model_len: int, default: int | None, prompt_field: str) -> int:
        """Return the limit of the output. Raise `InvalidRequest` if it exceeds the context or leaves no token."""
        room = max_model_len - prompt_len
        if room < (1 if self.max_tokens is None else self.max_tokens):
            output = "" if self.max_tokens is None else f" and max_tokens is {brief(self.max_tokens)}"
            param = "max_tokens" if room > 0 else prompt_field
            raise context_exceeded(max_model_len, f"the prompt has {prompt_len}{output}", param)
        if self.max_tokens is not None:
            return self.max_tokens
        return room if default is None else min(default, room)


def whole(name: str, value: Any) -> int:
    """Return a whole number as an int, also if it is written as 5.0. Raise `InvalidRequest` naming the field."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, bool):
        with suppress(TypeError):  # raised unless it is an integer, or such a scalar of numpy or torch
            return operator.index(value)
    raise InvalidRequest(f"{name} must be a whole number, got {brief(value)}", name)


def real(name: str, value: Any) -> float:
    """Return a number as it is, or as a float. Raise `InvalidRequest` naming the field."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # it may be too large for a float
    if isinstance(value, float):
        return float(value)  # numpy's float64 is a float to Python, but not to msgspec's encoder
    if hasattr(value, "dtype") and not any(name in str(value.dtype) for name in ("bool", "complex")):
        with suppress(TypeError, ValueError, RuntimeError):  # raised for an array, for instance
            return float(value)
    raise InvalidRequest(f"{name} must be a number, got {brief(value)}", name)


def boolean(name: str, value: Any) -> bool:
    """Return a bool. Raise `InvalidRequest`, naming the field, for anything else."""
    _check(isinstance(value, bool), name, "must be true or false", value)
    return bool(value)


def cache_salt(value: Any) -> str:
    """Return a request's `cache_salt`, or "" for None. Raise `InvalidRequest` unless it is a text of a fair length."""
    if value is None:
        return ""
    valid = isinstance(value, str) and 1 <= len(value) <= MAX_CACHE_SALT
    _check(valid, "cache_salt", f"must be a text of 1 to {MAX_CACHE_SALT} characters", value)
    return str(value)


def _check(holds: bool, param: str, rule: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {rule}, got {brief(value)}", param)


def _between(param: str, value: float, low: float, high: float) -> None:
    _check(low <= value <= high, param, f"must be between {low} and {high}", value)


def _check_length(param: str, values: Any, limit: int, items: str) -> None:
    """Raise `InvalidRequest` unless `values` is a collection of at most `limit` items."""
    _check(_is_collection(values), param, f"must be a list of {items}", values)
    _check(len(values) <= limit, param, f"must hold at most {limit} {items}", len(values))


def _is_collection(values: Any) -> bool:
    """Return whether `values` has a length and can be looped over, and is not text."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return False
    with suppress(TypeError):  # an array without dimensions has __iter__, but no length
        return len(values) >= 0
    return False


def _bias(key: object, value: Any) -> float:
    try:
        bias = real("logit_bias", value)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.message} for token {brief(key)}", "logit_bias") from error
    if not -100.0 <= bias <= 100.0:
        raise InvalidRequest(
            f"logit_bias must be between -100 and 100 for token {brief(key)}, got {brief(bias)}", "logit_bias"
        )
    return bias


def _token_in_vocabulary(param: str, token: object, vocab_size: int) -> int:
    """Return `token` as an int; keys of JSON are strings. Raise `InvalidRequest` if it is not in the vocabulary."""
    id = int(token) if isinstance(token, str) and _ID.fullmatch(token) else token
    if not isinstance(id, int) or not 0 <= id < vocab_size:
        valid = f"from 0 to {vocab_size - 1} (a vocabulary of {vocab_size})"
        raise InvalidRequest(f"{param} must hold token ids {valid}, got {brief(token)}", param)
    return id

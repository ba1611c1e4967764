"""`SamplingParams`: how one request is to be sampled, as its user said it.

Both front doors make one of these; it checks itself when it is made, so that a wrong value is refused in the same
words everywhere. `lower` turns it into the wire's `Sampling`.
"""

import math
import secrets
from collections.abc import Iterable, Sequence

from msgspec import Struct

from shared.errors import InvalidRequest
from shared.protocol import Sampling

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 4
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of one request. Raises `InvalidRequest`, naming the field, for a value out of its range.

    `max_tokens` of None means to the end of the context. `seed` of None or -1 means unseeded. `logprobs` asks for
    so many alternatives for each output token (0: only the token's own); `top_logprobs` is the chat API's name for
    the same number. `top_k` of 0 or -1 is off. A temperature of 0 is greedy.
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
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
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
        positive = self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)
        _check(positive, "repetition_penalty", "must be greater than 0 and finite", self.repetition_penalty)
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _between(name, value, 0, MAX_LOGPROBS)
        stops = self.stop_strings
        _check(len(stops) <= MAX_STOP_STRINGS, "stop", f"must hold at most {MAX_STOP_STRINGS} strings", len(stops))
        _check(all(stops), "stop", "must not hold an empty string", "")
        for token, bias in (self.logit_bias or {}).items():
            _check(-100.0 <= bias <= 100.0, "logit_bias", f"must be between -100 and 100 for token {token}", bias)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted for each output token; None if no log-probabilities are wanted at all."""
        wanted = [count for count in (self.logprobs, self.top_logprobs) if count is not None]
        return max(wanted, default=None)

    def lower(self, *, prompt_len: int, max_model_len: int, vocab_size: int, eos_token_ids: Iterable[int]) -> Sampling:
        """The wire's form of these parameters, for a prompt of `prompt_len` tokens.

        An unseeded request is given a seed here, so that whatever happens to it later, its noise stays the same.
        Raises `InvalidRequest` for what only the model and the prompt can tell: token ids beyond the vocabulary, and
        lengths beyond the context.
        """
        for token in self.stop_token_ids or ():
            _token_in_vocabulary("stop_token_ids", token, vocab_size)
        for token in self.logit_bias or ():
            _token_in_vocabulary("logit_bias", token, vocab_size)
        stop_ids = dict.fromkeys(self.stop_token_ids or ())  # a set in order
        if not self.ignore_eos:
            stop_ids |= dict.fromkeys(eos_token_ids)
        unseeded = self.seed is None or self.seed == -1
        wanted = self.num_logprobs
        max_tokens = self._room(prompt_len, max_model_len)
        _check(
            self.min_tokens <= max_tokens,
            "min_tokens",
            f"must be at most {max_tokens}, which is the room left",
            self.min_tokens,
        )
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
            logit_bias=sorted((self.logit_bias or {}).items()),
            min_tokens=self.min_tokens,
            stop_token_ids=list(stop_ids),
            logprobs=-1 if wanted is None else wanted,
            prompt_logprobs=-1 if self.prompt_logprobs is None else self.prompt_logprobs,
        )

    def _room(self, prompt_len: int, max_model_len: int) -> int:
        wanted = 1 if self.max_tokens is None else self.max_tokens
        if prompt_len + wanted > max_model_len:
            asked = "" if self.max_tokens is None else f" and max_tokens is {self.max_tokens}"
            raise InvalidRequest(
                f"the context of this model is {max_model_len} tokens, but the prompt has {prompt_len}{asked}",
                "prompt" if prompt_len >= max_model_len else "max_tokens",
            )
        return max_model_len - prompt_len if self.max_tokens is None else self.max_tokens


def _check(holds: bool, param: str, rule: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {rule}, got {value!r}", param)


def _between(param: str, value: float, low: float, high: float) -> None:
    _check(low <= value <= high, param, f"must be between {low} and {high}", value)


def _token_in_vocabulary(param: str, token: int, vocab_size: int) -> None:
    _check(0 <= token < vocab_size, param, f"must hold token ids from 0 to {vocab_size - 1}", token)

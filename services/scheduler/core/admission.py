"""Accept or refuse a `Submit`. The decision is final: an accepted request can be served.

This is the only check of a request on the engine's side. Gateways check what their clients ask for; this checks what
gateways send, since a token id out of range would end a worker's process. Bounds that are the same for every engine are
in the types of the messages.

The length limit applies to one sequence, since the samples of a request need not run together; the limit of the queue
counts them all. A request that another engine has accepted before, or this one's former process, is never refused for
load, within bounds of memory: its client was promised an answer, and may have received a part of it.
"""

from array import array

from msgspec import Struct

from services.scheduler.core.limits import Limits
from shared.errors import ProtocolError
from shared.params import MAX_CANDIDATES, MAX_LOGPROBS, MAX_N
from shared.protocol import Refusal, Refused, Sampling, Submit, unpack_tokens

TOKEN_BYTES = 4

MAX_RESUMED = 65_536
"""Samples that may wait before even requests are refused that were accepted elsewhere, which no honest gateway sees."""

MAX_RESUMED_TOKENS = 2**28
"""The same bound for the tokens of waiting samples, which take a gigabyte."""


class Load(Struct, frozen=True):
    """The state of the engine when a request comes."""

    waiting: int  # samples, including those that have not started
    waiting_tokens: int
    draining: bool
    id_in_use: bool
    retry_after: float  # seconds
    has_adapter: bool = True  # that the request names, if it names one

    def has_too_many_requests(self, samples: int, limits: Limits) -> bool:
        """Return whether the queue has no place for a new request of so many samples.

        An empty queue has a place for any request, since a large one could never come in otherwise.
        """
        return self.waiting > 0 and self.waiting + samples > limits.max_queued_requests


def accept(submit: Submit, limits: Limits, load: Load) -> "array[int] | Refused":
    """Return the tokens of an accepted request, or the refusal."""
    if len(submit.tokens) // TOKEN_BYTES > limits.max_model_len:  # before anything looks at each of them
        detail = f"{len(submit.tokens) // TOKEN_BYTES} tokens are more than the {limits.max_model_len} of the context"
        return Refused(submit.id, Refusal.TOO_LONG, detail)
    try:
        tokens = unpack_tokens(submit.tokens)
    except ProtocolError as error:
        return Refused(submit.id, Refusal.INVALID, str(error))
    if not load.has_adapter:
        files = " of the files that have computed the output" if submit.adapter_digest else ""
        return Refused(submit.id, Refusal.UNKNOWN_ADAPTER, f"there is no adapter {submit.adapter!r}{files}")
    if violation := _violation(submit, tokens, limits, load):
        return Refused(submit.id, Refusal.INVALID, violation)
    max_tokens = submit.sampling.max_tokens
    if submit.prompt_len + max_tokens > limits.max_model_len:
        detail = f"{submit.prompt_len} tokens of prompt and {max_tokens} of output"
        detail += f" are more than the {limits.max_model_len} of the context"
        return Refused(submit.id, Refusal.TOO_LONG, detail)
    if load.draining:
        return Refused(submit.id, Refusal.DRAINING, "the engine is shutting down")
    if submit.resumed or len(tokens) > submit.prompt_len:
        if load.waiting + submit.n > MAX_RESUMED or load.waiting_tokens + len(tokens) > MAX_RESUMED_TOKENS:
            return Refused(submit.id, Refusal.QUEUE_FULL, "the queue has no memory for another request", 1.0)
        return tokens
    if overload := _overload(submit.n, tokens, limits, load):
        return Refused(submit.id, Refusal.QUEUE_FULL, overload, load.retry_after)
    return tokens


def _violation(submit: Submit, tokens: "array[int]", limits: Limits, load: Load) -> str:
    """Return the rule that a request breaks; empty if it breaks none."""
    sampling, output_len = submit.sampling, len(tokens) - submit.prompt_len
    if submit.n > MAX_N or submit.sample >= MAX_N:
        return f"a request has at most {MAX_N} samples"
    for count, limit in ((sampling.logprobs, MAX_CANDIDATES), (sampling.prompt_logprobs, MAX_LOGPROBS)):
        if count > limit:
            return f"at most {limit} log-probabilities are reported for a token"
    if sampling.allowed_tokens and not any(sampling.allowed_tokens):
        return "no token is allowed"
    if (unknown := _unknown_token(tokens, sampling, limits.vocab_size)) is not None:
        return f"the model has no token {unknown}"
    if load.id_in_use:
        return "the id is in use"
    if output_len < 0 or submit.prompt_len < 1:
        return f"prompt_len is {submit.prompt_len}, but there are {len(tokens)} tokens"
    if 0 < output_len >= sampling.max_tokens:
        return f"{output_len} tokens of output leave none of max_tokens={sampling.max_tokens}"
    if submit.n < 1:
        return f"n must be at least 1, got {submit.n}"
    if submit.n > 1 and output_len > 0:
        return "n must be 1 when there is output already"
    if submit.priority and limits.policy == "fcfs":
        return "a priority needs --scheduling-policy priority"
    return ""


def _unknown_token(tokens: "array[int]", sampling: Sampling, vocab_size: int) -> int | None:
    """Return a token id of the request that is not in the vocabulary, or None if all are."""
    highest_allowed = max(int.from_bytes(sampling.allowed_tokens, "little").bit_length() - 1, 0)
    biased = [token for token, _ in sampling.logit_bias]
    limit = sampling.reasoning_limit
    markers = [] if limit is None else limit.begins + limit.ends
    scored = sampling.logprob_token_ids
    for ids in (tokens, sampling.stop_token_ids, biased, [highest_allowed], markers, scored, *sampling.bad_words):
        for extreme in (min(ids, default=0), max(ids, default=0)):  # much faster than checking each id
            if not 0 <= extreme < vocab_size:
                return extreme
    return None


def _overload(samples: int, tokens: "array[int]", limits: Limits, load: Load) -> str:
    """Return why the queue has no place for a request of so many samples and these tokens; empty if it has."""
    if load.has_too_many_requests(samples, limits):
        more = f", and {samples} more are too many" if samples > 1 else ""
        return f"{load.waiting} requests are waiting already" + more
    waiting = load.waiting_tokens
    if limits.max_queued_tokens and waiting and waiting + len(tokens) > limits.max_queued_tokens:
        return f"requests of {waiting} tokens are waiting already"
    return ""

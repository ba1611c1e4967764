"""What no worker must be handed, whoever sent it: gateways check their clients' wishes, and this checks the gateways.

An index out of range would end a worker's process, or this one. Ranges that depend on nothing are in the messages'
types; lengths, which depend on the engine's limits, are the core's to judge.
"""

from collections.abc import Iterable

from shared.errors import ProtocolError
from shared.params import MAX_LOGPROBS, MAX_N
from shared.protocol import Submit, unpack_tokens


def fault(submit: Submit, vocab_size: int) -> str:
    """Why a request cannot be computed by any worker of this model; empty if it can."""
    sampling = submit.sampling
    if submit.n > MAX_N or submit.sample >= MAX_N:
        return f"a request has at most {MAX_N} samples"
    if max(sampling.logprobs, sampling.prompt_logprobs) > MAX_LOGPROBS:
        return f"at most {MAX_LOGPROBS} log-probabilities are reported for a token"
    token = _stranger(submit, vocab_size)
    return "" if token is None else f"the model has no token {token}"


def _stranger(submit: Submit, vocab_size: int) -> int | None:
    """A token id that the model does not have, if there is one."""
    try:
        tokens = unpack_tokens(submit.tokens)
    except ProtocolError:
        return None  # the core refuses it
    biased = [token for token, _ in submit.sampling.logit_bias]
    groups: tuple[Iterable[int], ...] = (tokens, submit.sampling.stop_token_ids, biased)
    for group in groups:
        for extreme in (min(group, default=0), max(group, default=0)):  # far faster than looking at each of them
            if not 0 <= extreme < vocab_size:
                return extreme
    return None

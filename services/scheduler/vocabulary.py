"""Token ids that a model does not have must not reach a worker: an index out of range may end its process."""

from collections.abc import Iterable

from shared.errors import ProtocolError
from shared.protocol import Submit, unpack_tokens


def stranger(submit: Submit, vocab_size: int) -> int | None:
    """A token id of the request that the model does not have; None if there is no such."""
    try:
        tokens = unpack_tokens(submit.tokens)
    except ProtocolError:
        return None  # the core refuses it
    sampling = submit.sampling
    biased = [token for token, _ in sampling.logit_bias]
    groups: tuple[Iterable[int], ...] = (tokens, sampling.stop_token_ids, biased)
    for group in groups:
        for extreme in (min(group, default=0), max(group, default=0)):  # far faster than looking at each of them
            if not 0 <= extreme < vocab_size:
                return extreme
    return None

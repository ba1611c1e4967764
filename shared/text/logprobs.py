"""`LogprobEntry`: a token's log-probability with the token's text.

These functions turn the wire's `TokenLogprobs` (ids and numbers) into entries that both front doors show (text, bytes
and offsets). Log-probabilities are at least -9999, so that they are always finite.
"""

from collections.abc import Sequence

from msgspec import Struct

from shared.protocol import TokenLogprobs
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer

FLOOR = -9999.0


class Alternative(Struct, frozen=True, gc=False):
    """A likely token at a position, as an alternative to the one that stands there."""

    id: int
    token: str
    bytes: bytes
    logprob: float
    rank: int


class LogprobEntry(Struct, frozen=True):
    """A token of the output or the prompt. `logprob` is None for the first token of a prompt."""

    id: int
    token: str
    bytes: bytes
    logprob: float | None
    rank: int
    offset: int  # characters of text before the token
    top: list[Alternative]  # the likeliest first, as many as were requested


def make_entry(
    tokenizer: Tokenizer, token: int, logprobs: TokenLogprobs | None, offset: int, at_start: bool = False
) -> LogprobEntry:
    """Return the entry of `token`, whose text begins at `offset`. `at_start`: it is the first token of its text."""
    text, raw = tokenizer.token_text(token, at_start), tokenizer.token_bytes(token, at_start)
    if logprobs is None:
        return LogprobEntry(token, text, raw, None, 0, offset, [])
    top = [
        Alternative(id, tokenizer.token_text(id, at_start), tokenizer.token_bytes(id, at_start), finite(logprob), rank)
        for rank, (id, logprob) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), 1)
    ]
    return LogprobEntry(token, text, raw, finite(logprobs.logprob), logprobs.rank, offset, top)


def prompt_entries(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    offsets: Sequence[int] | None = None,
) -> list[LogprobEntry]:
    """Return the entries of all tokens of a prompt. `logprobs` are those of positions 1 and up.

    `offsets` are by default those in the text that the tokens spell, special tokens included.
    """
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=False)
    length = 0
    entries = []
    for index, (token, own) in enumerate(zip(prompt, [None, *logprobs], strict=True)):
        offset = length + detokenizer.breaks_character(token) if offsets is None else offsets[index]
        entries.append(make_entry(tokenizer, token, own, offset, detokenizer.at_start))
        length += len(detokenizer.push(token))
    return entries


def finite(logprob: float) -> float:
    """Return `logprob`, or the floor if it is lower or not a number."""
    return max(logprob, FLOOR) if logprob == logprob else FLOOR

"""`LogprobEntry`: a token's log-probability with the text that goes with it.

Turns the wire's `TokenLogprobs` (ids and numbers) into what both front doors show (text, bytes, offsets). Numbers
are floored at -9999, so that they are always finite.
"""

from collections.abc import Sequence

from msgspec import Struct

from shared.protocol import TokenLogprobs
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer

FLOOR = -9999.0


class Alternative(Struct, frozen=True, gc=False):
    """One of the likeliest tokens at a position."""

    id: int
    token: str
    bytes: bytes
    logprob: float
    rank: int


class LogprobEntry(Struct, frozen=True):
    """One token of the output or the prompt. `logprob` is None for the first token of a prompt, which has none."""

    id: int
    token: str
    bytes: bytes
    logprob: float | None
    rank: int
    offset: int  # characters of text before the token
    top: list[Alternative]  # best first, as many as were asked for


def make_entry(
    tokenizer: Tokenizer, token: int, found: TokenLogprobs | None, offset: int, at_start: bool = False
) -> LogprobEntry:
    """Return the entry of `token` at `offset`, with `found` about its position, which may be the start of the text."""
    text, raw = tokenizer.token_text(token, at_start), tokenizer.token_bytes(token, at_start)
    if found is None:
        return LogprobEntry(token, text, raw, None, 0, offset, [])
    top = [
        Alternative(id, tokenizer.token_text(id, at_start), tokenizer.token_bytes(id, at_start), finite(logprob), rank)
        for rank, (id, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1)
    ]
    return LogprobEntry(token, text, raw, finite(found.logprob), found.rank, offset, top)


def prompt_entries(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    found: Sequence[TokenLogprobs],
    offsets: Sequence[int] | None = None,
) -> list[LogprobEntry]:
    """Return entries of all tokens of a prompt; `found` is about positions 1 and up.

    Without `offsets`, they are those in the tokens' own text, special tokens included.
    """
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=False)
    length = 0
    entries = []
    for at, (token, known) in enumerate(zip(prompt, [None, *found], strict=True)):
        offset = length + detokenizer.breaks_character(token) if offsets is None else offsets[at]
        entries.append(make_entry(tokenizer, token, known, offset, detokenizer.at_start))
        length += len(detokenizer.push(token))
    return entries


def finite(logprob: float) -> float:
    """`logprob`, or the floor where it is lower or not a number."""
    return max(logprob, FLOOR) if logprob == logprob else FLOOR

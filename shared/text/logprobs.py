"""`LogprobEntry`: a token's log-probability with the token's text.

These functions turn the engine's `TokenLogprobs` (ids and numbers) into entries with text, bytes and offsets, which the
HTTP API and `quire.LLM` show. Log-probabilities are at least -9999, so that they are always finite.
"""

from collections.abc import Sequence

from msgspec import Struct

from shared.protocol import TokenLogprobs
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0


class Alternative(Struct, frozen=True, gc=False):
    """One of the likeliest tokens at a position, or one that the request names."""

    id: int
    token: str
    bytes: bytes
    logprob: float
    rank: int | None  # 1 is the likeliest token; None: it was not counted


class LogprobEntry(Struct, frozen=True):
    """A token of the output or the prompt. `logprob` is None for the first token of a prompt."""

    id: int
    token: str
    bytes: bytes
    logprob: float | None
    rank: int  # 1 is the likeliest token
    offset: int  # characters of text before the token
    top: list[Alternative]  # the likeliest first, as many as were requested, or those that the request names


def make_entry(
    tokenizer: Tokenizer | None,
    token: int,
    logprobs: TokenLogprobs | None,
    offset: int,
    at_start: bool = False,
    *,
    ranked: bool = True,
) -> LogprobEntry:
    """Return the entry of `token`. Its text begins at character `offset`; `at_start`: it is the first of its text.

    Without a tokenizer, the texts are empty. Unless `ranked`, the alternatives are not the likeliest tokens.
    """

    def spell(id: int) -> tuple[str, bytes]:
        if tokenizer is None:
            return "", b""
        return tokenizer.token_text(id, at_start), tokenizer.token_bytes(id, at_start)

    text, raw = spell(token)
    if logprobs is None:
        return LogprobEntry(token, text, raw, None, 0, offset, [])
    top = [
        Alternative(id, *spell(id), finite(logprob), rank if ranked else None)
        for rank, (id, logprob) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), 1)
    ]
    return LogprobEntry(token, text, raw, finite(logprobs.logprob), logprobs.rank, offset, top)


def prompt_entries(
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    offsets: Sequence[int] | None = None,
) -> list[LogprobEntry]:
    """Return the entries of all tokens of a prompt. `logprobs` are those of positions 1 and up.

    `offsets` are the characters before each token, by default in the decoded text with special tokens.
    Without a tokenizer, the texts are empty and the offsets 0.
    """
    if tokenizer is None:
        return [make_entry(None, token, entry, 0) for token, entry in zip(prompt, [None, *logprobs], strict=True)]
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=False)
    length = 0
    entries = []
    for index, (token, token_logprobs) in enumerate(zip(prompt, [None, *logprobs], strict=True)):
        offset = length + detokenizer.breaks_character(token) if offsets is None else offsets[index]
        entries.append(make_entry(tokenizer, token, token_logprobs, offset, detokenizer.at_start))
        length += len(detokenizer.push(token))
    return entries


def finite(logprob: float) -> float:
    """Return `logprob`, or `MIN_LOGPROB` if it is lower or NaN."""
    return max(logprob, MIN_LOGPROB) if logprob == logprob else MIN_LOGPROB

"""Formats log-probabilities in the API's three formats: a chat's, a completion's, and vLLM's for prompts.

Each generated token has one entry, the token that ended the sample included. Two of the formats have tokens as text, or
as `token_id:` with the number if `as_ids`, which tells tokens of the same text apart. Each entry is encoded as soon as
it is made: a response may have a million of them, and so many objects would take one long call to encode, and another
to free.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.generation import Generation
from services.gateway.response import to_json
from shared.text.logprobs import Alternative, LogprobEntry

MANY_LOGPROBS = 2000  # they take a few milliseconds to encode


def has_many_logprobs(generations: Sequence[Generation]) -> bool:
    """Return whether encoding all log-probabilities, alternatives included, would keep the loop too long."""
    return sum(map(_count, generations)) > MANY_LOGPROBS


def _count(generation: Generation) -> int:
    params, sampling = generation.prompt.params, generation.prompt.sampling
    count = generation.text.num_output_tokens * (sampling.num_alternatives + 1)  # -1: none
    if params.prompt_logprobs is not None:
        count += len(generation.prompt.tokens) * (params.prompt_logprobs + 1)
    return count


def chat_logprobs(entries: Sequence[LogprobEntry], as_ids: bool = False) -> dict[str, Any]:
    """Return `{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}`."""
    return {"content": [_raw(_with_alternatives(entry, as_ids)) for entry in entries]}


def completion_logprobs(entries: Sequence[LogprobEntry], count: int, as_ids: bool = False) -> dict[str, list[Any]]:
    """Return four lists with an item for each entry. `top_logprobs` has its first `count` alternatives and its own."""
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "tokens": [_name(entry, as_ids) for entry in entries],
        "top_logprobs": [_raw(_alternatives(entry, count, as_ids)) for entry in entries],
    }


def prompt_logprobs(entries: Sequence[LogprobEntry], count: int) -> list[msgspec.Raw | None]:
    """Return a mapping by token id for each token of a prompt: the `count` likeliest and itself; null at the first."""
    return [None if entry.logprob is None else _raw(_by_id(entry, count)) for entry in entries]


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(to_json(value))


def _with_alternatives(entry: LogprobEntry, as_ids: bool) -> dict[str, Any]:
    return _token(entry, as_ids) | {"top_logprobs": [_token(other, as_ids) for other in entry.top]}


def _token(entry: LogprobEntry | Alternative, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(entry, as_ids), "logprob": entry.logprob, "bytes": list(entry.bytes)}


def _name(entry: LogprobEntry | Alternative, as_ids: bool) -> str:
    return f"token_id:{entry.id}" if as_ids else entry.token


def _alternatives(entry: LogprobEntry, count: int, as_ids: bool) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    logprobs: dict[str, float] = {}
    own = _name(entry, as_ids), entry.logprob
    for name, logprob in (*((_name(other, as_ids), other.logprob) for other in entry.top[:count]), own):
        logprobs[name] = max(logprob, logprobs.get(name, logprob))  # two may have the same text: keep the likelier one
    return logprobs


def _by_id(entry: LogprobEntry, count: int) -> dict[str, Any]:
    top = {
        str(other.id): {"logprob": other.logprob, "rank": other.rank, "decoded_token": other.token}
        for other in entry.top[:count]
    }
    own = {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.token}
    return {str(entry.id): own} | top

"""Makes what the responses of both endpoints share: their first fields, the ids of tokens, and the usage.

Each prompt counts once in the usage, whatever its number of samples.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from services.gateway.generation import Generation
from shared.text.sample_text import SampleText

MANY_IDS = 50_000  # they take a millisecond to encode

to_json = msgspec.json.Encoder().encode


def json_response(answer: Struct | dict[str, Any]) -> web.Response:
    """Return an answer as a whole response."""
    return web.Response(body=to_json(answer), content_type="application/json")


class ResponseHead(Struct, frozen=True):
    """`id`, `object`, `created` and `model`, which are the same in each chunk of a stream."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def now(cls, id: str, object: str, model: str) -> "ResponseHead":
        """Return the head of a response that is created now."""
        return cls(id, object, int(time.time()), model)

    @property
    def chunk_prefix(self) -> bytes:
        """Return the JSON of a chunk up to its choices. It is the same for all chunks of a stream."""
        return msgspec.json.encode(self)[:-1] + b',"choices":['

    def respond(self, choices: list[Any], **rest: Any) -> web.Response:
        """Return the whole response, with `rest` as further fields."""
        fields = msgspec.structs.asdict(self) | {"choices": choices} | rest
        return json_response(fields)


def has_many_ids(generations: Sequence[Generation]) -> bool:
    """Return whether encoding the ids of all tokens, those of the prompts included, would keep the loop too long."""
    return sum(len(one.prompt.tokens) + one.text.num_output_tokens for one in generations) > MANY_IDS


def raw_ids(tokens: Sequence[int]) -> msgspec.Raw:
    """Return token ids as JSON, which may be copied into several choices."""
    return msgspec.Raw(to_json(list(tokens)))


class StreamedTokenIds:
    """Gives each chunk of a stream the ids of those tokens whose text has come since the choice's last chunk."""

    def __init__(self) -> None:
        self._num_sent: dict[int, int] = {}  # by choice

    def take(self, choice_index: int, sample: SampleText) -> list[int]:
        """Return the ids for the next chunk of a choice."""
        start, end = self._num_sent.get(choice_index, 0), sample.num_shown_tokens
        self._num_sent[choice_index] = end
        return sample.token_ids[start:end]


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the usage of all tokens generated so far, stop and end-of-sequence tokens included."""
    return _usage(
        sum(len(generation.prompt.tokens) for generation in generations),
        sum(generation.text.num_output_tokens for generation in generations),
        sum(generation.text.num_cached_tokens for generation in generations),
        _num_reasoning_tokens(generations),
    )


class StreamedUsage:
    """The usage of what a stream has sent so far. It keeps sums, since a stream may have a thousand choices."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._prompt = sum(len(generation.prompt.tokens) for generation in generations)
        self._with_reasoning = [
            generation for generation in generations if generation.num_reasoning_tokens is not None
        ]  # a chat's only one, if at all
        self._output, self._cached = _RunningTotal(), _RunningTotal()

    def set_output(self, choice_index: int, num_tokens: int) -> None:
        """Set the number of tokens of a choice that have been sent."""
        self._output.set(choice_index, num_tokens)

    def set_cached(self, prompt_index: int, num_tokens: int) -> None:
        """Set the number of tokens of a prompt that were found in the prefix cache."""
        self._cached.set(prompt_index, num_tokens)

    def now(self) -> dict[str, Any]:
        """Return the usage so far."""
        return _usage(self._prompt, self._output.total, self._cached.total, _num_reasoning_tokens(self._with_reasoning))


class _RunningTotal:
    """The sum of the last values of all keys."""

    def __init__(self) -> None:
        self.total = 0
        self._values: dict[int, int] = {}

    def set(self, key: int, value: int) -> None:
        self.total += value - self._values.get(key, 0)
        self._values[key] = value


def _num_reasoning_tokens(generations: Sequence[Generation]) -> int | None:
    """Return the number of tokens of reasoning; None if no output was parsed for it."""
    counts = [count for generation in generations if (count := generation.num_reasoning_tokens) is not None]
    return sum(counts) if counts else None


def _usage(prompt: int, output: int, cached: int, reasoning: int | None) -> dict[str, Any]:
    details = {} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return details | {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }

"""The events of a stream of choices: each has a chunk, the last one is `[DONE]`."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from services.gateway import errors
from services.gateway.api_requests import StreamOptions
from services.gateway.errors import ApiError
from services.gateway.generation import Generation, Update
from services.gateway.response import StreamedUsage, usage

DONE = b"data: [DONE]\n\n"
ALL_USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)


class ChunkEncoder(Protocol):
    """Encodes the chunks of an endpoint. `index` is that of a choice in the response."""

    @property
    def prefix(self) -> bytes:
        """Return the JSON of a chunk up to its choices: `{"id": ..., "choices": [`."""

    def openings(self, index: int, generation: Generation) -> Iterable[tuple[bytes, bytes]]:
        """Return what comes before the first text of a choice: objects of it, each with further fields of its chunk."""

    async def prepare(self, prompt_index: int, generation: Generation) -> None:
        """Make what the first chunks of a prompt need, in a thread if it takes long."""

    def choice(self, index: int, generation: Generation, update: Update) -> bytes:
        """Return the object of a choice for an update."""


class ChoiceEvents:
    """Puts the chunks of an encoder into events, with the usage that `options` ask for. It is an `EventEncoder`."""

    def __init__(self, encoder: ChunkEncoder, options: StreamOptions | None, *, all_usage: bool) -> None:
        self._encoder = encoder
        self._head = b"data: " + encoder.prefix
        self._generations: Sequence[Generation] = ()
        self._streamed_usage = StreamedUsage([])
        options = ALL_USAGE if all_usage else options or StreamOptions()
        self._with_usage = bool(options.include_usage)
        self._usage_in_chunks = self._with_usage and bool(options.continuous_usage_stats)

    def begin(self, generations: Sequence[Generation]) -> bytes:
        self._generations, self._streamed_usage = generations, StreamedUsage(generations)
        return b""

    async def prepare(self, prompt_index: int, generation: Generation) -> None:
        if self._usage_in_chunks:  # the openings have it
            self._streamed_usage.set_cached(prompt_index, generation.text.num_cached_tokens)
        await self._encoder.prepare(prompt_index, generation)

    def openings(self, index: int, generation: Generation) -> bytes:
        return b"".join(self._chunk(*opening) for opening in self._encoder.openings(index, generation))

    def update(self, index: int, generation: Generation, update: Update) -> bytes:
        if self._usage_in_chunks:
            samples = generation.text.samples
            self._streamed_usage.set_cached(index // len(samples), generation.text.num_cached_tokens)
            self._streamed_usage.set_output(index, samples[update.sample].num_shown_tokens)
        return self._chunk(self._encoder.choice(index, generation, update))

    def end(self) -> bytes:
        """Return the usage, if it is requested, and the end of the stream."""
        if not self._with_usage:
            return DONE
        total = msgspec.json.encode(usage(self._generations))
        return self._head + b'],"usage":' + total + b"}\n\n" + DONE

    def fail(self, error: ApiError) -> bytes:
        return b"data: " + errors.error_body(error) + b"\n\n" + DONE

    def _chunk(self, choice: bytes, fields: bytes = b"") -> bytes:
        if not choice:
            return b""
        if self._usage_in_chunks:
            fields += b',"usage":' + msgspec.json.encode(self._streamed_usage.now())
        return b"".join((self._head, choice, b"]", fields, b"}\n\n"))

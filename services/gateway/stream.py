"""Responses to requests: streamed as server-sent events, or collected and sent as one object.

The engine decides the status. The headers of a stream wait until every prompt has been accepted, however long that
takes, so that a refusal has its own status and Retry-After even in a stream. A later error is sent as one event that
holds it, and `[DONE]`.

An accepted request may wait in the queue for long. While nothing else is written, a comment is sent now and then, lest
a proxy close a connection that looks idle. Comments are rare, for a client may not expect them: vLLM's benchmark strips
the blank line behind a comment that comes alone, and would take the next event for part of the comment. So the next
event is preceded by a blank line, which ends the comment for such a reader, and means nothing to others.

All rows that wait for one prompt are written together, one chunk for each sample.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Protocol

import msgspec
from aiohttp import web

from services.gateway import errors
from services.gateway.api_requests import StreamOptions
from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.gateway.generation import Generation, Update, submit
from services.gateway.prompt import PreparedPrompt
from services.gateway.response import StreamedUsage, usage

COMMENT = b": keep-alive\n\n"
AFTER_COMMENT = b":\n\n"
DONE = b"data: [DONE]\n\n"
ALL_USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ChunkEncoder(Protocol):
    """An endpoint's encoding of chunks. `index` is that of a choice in the response."""

    @property
    def prefix(self) -> bytes:
        """Return the JSON of a chunk up to its choices: `{"id": ..., "choices": [`."""

    def opening(self, index: int, generation: Generation) -> bytes:
        """Return the choice object before the first text of a choice, or b'' if there is none."""

    async def prepare(self, position: int, generation: Generation) -> None:
        """Make what the first chunks of the prompt at `position` need, off the loop if it takes long."""

    def choice(self, index: int, generation: Generation, update: Update) -> bytes:
        """Return the choice object of an update."""


async def collect(gateway: Gateway, prompts: Sequence[PreparedPrompt]) -> list[Generation]:
    """Run all prompts to their ends. Raise the exception of the first one that fails."""
    async with gateway.lifecycle.running(), AsyncExitStack() as stack:
        generations = await _submit_all(stack, gateway, prompts)
        async with asyncio.TaskGroup() as tasks:
            for generation in generations:
                tasks.create_task(generation.finish())
    return generations


async def _submit_all(stack: AsyncExitStack, gateway: Gateway, prompts: Sequence[PreparedPrompt]) -> list[Generation]:
    """Enter the regions of all prompts. There may be a thousand, so other requests get their turn in between."""
    generations: list[Generation] = []
    for prompt in prompts:
        generations.append(await stack.enter_async_context(submit(gateway, prompt)))
        await asyncio.sleep(0)
    return generations


async def stream(
    request: web.Request,
    gateway: Gateway,
    prompts: Sequence[PreparedPrompt],
    encoder: ChunkEncoder,
    options: StreamOptions | None,
) -> web.StreamResponse:
    """Run all prompts, and write what they generate. Raise only what can still be answered with a status."""
    writer = _StreamWriter(request, encoder, options, gateway.config)
    try:
        async with gateway.lifecycle.running(), AsyncExitStack() as stack:
            writer.generations = await _submit_all(stack, gateway, prompts)
            await writer.open()
            async with asyncio.TaskGroup() as tasks:
                comments = tasks.create_task(writer.keep_alive())
                await asyncio.wait([tasks.create_task(writer.write(position)) for position in range(len(prompts))])
                comments.cancel()
            await writer.end()
    except Exception as error:
        await writer.fail(error)
    return writer.response


def _is_disconnect(error: BaseException) -> bool:
    """Return whether `error` means that the client has left."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_disconnect(one) for one in error.exceptions)
    return isinstance(error, ConnectionError)


class _StreamWriter:
    """One stream. The tasks of its prompts share the response, and each write holds whole chunks."""

    def __init__(
        self, request: web.Request, encoder: ChunkEncoder, options: StreamOptions | None, config: GatewayConfig
    ) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self.generations: list[Generation] = []
        self._request = request
        self._encoder = encoder
        self._streamed_usage = StreamedUsage([])
        self._keep_alive_interval = config.sse_keep_alive_interval or math.inf
        options = ALL_USAGE if config.enable_force_include_usage else options or StreamOptions()
        self._with_usage = bool(options.include_usage)
        self._usage_in_chunks = self._with_usage and bool(options.continuous_usage_stats)
        self._idle = False  # nothing was written since `keep_alive` last checked
        self._event_prefix = b""  # written before the next event

    async def open(self) -> None:
        """Send the headers once every prompt is accepted. Raise a group of the exceptions of those that are not."""
        async with asyncio.TaskGroup() as tasks:
            for generation in self.generations:
                tasks.create_task(generation.wait_accepted())
        self._streamed_usage = StreamedUsage(self.generations)
        await self.response.prepare(self._request)

    async def keep_alive(self) -> None:
        """Write a comment whenever nothing else was written for an interval, until cancelled."""
        while self._keep_alive_interval < math.inf:
            self._idle = True
            await asyncio.sleep(self._keep_alive_interval)
            if self._idle:
                self._event_prefix = AFTER_COMMENT
                await self.response.write(COMMENT)

    async def write(self, position: int) -> None:
        """Write the updates of one prompt as they come, to its end.

        The opening chunks are written with the first update, since clients take the first chunk for the first token.
        """
        generation = self.generations[position]
        num_samples = len(generation.text.samples)
        base = position * num_samples
        updates = await self._updates(position)
        await self._encoder.prepare(position, generation)
        opening = b"".join(self._chunk(self._encoder.opening(base + index, generation)) for index in range(num_samples))
        while True:
            data = opening + b"".join(self._update(base + update.sample, generation, update) for update in updates)
            if data:
                await self.response.write(self._events(data))
            if generation.text.finished:
                return
            updates, opening = await self._updates(position), b""

    async def _updates(self, position: int) -> list[Update]:
        generation = self.generations[position]
        updates = await generation.updates()
        self._streamed_usage.set_cached(position, generation.text.num_cached_tokens)
        return updates

    async def end(self) -> None:
        """Write the usage, if it is requested, and the end of the stream."""
        last = b""
        if self._with_usage:
            whole = msgspec.json.encode(usage(self.generations))
            last = b"data: " + self._encoder.prefix + b'],"usage":' + whole + b"}\n\n"
        await self.response.write(self._events(last + DONE))
        await self.response.write_eof()

    async def fail(self, error: Exception) -> None:
        """Send `error` to the client if the status is sent already, or else raise it. Do neither if the client left."""
        if _is_disconnect(error):
            return
        if not self.response.prepared:
            raise error
        with suppress(ConnectionError):
            event = b"data: " + errors.error_body(errors.to_api_error(error)) + b"\n\n"
            await self.response.write(self._events(event + DONE))
            await self.response.write_eof()

    def _events(self, data: bytes) -> bytes:
        """Return the bytes to write for whole events."""
        prefix, self._event_prefix, self._idle = self._event_prefix, b"", False
        return prefix + data

    def _update(self, index: int, generation: Generation, update: Update) -> bytes:
        if self._usage_in_chunks:
            self._streamed_usage.set_output(index, generation.text.samples[update.sample].num_shown_tokens)
        return self._chunk(self._encoder.choice(index, generation, update))

    def _chunk(self, choice: bytes) -> bytes:
        if not choice:
            return b""
        tail = b"]}\n\n"
        if self._usage_in_chunks:
            tail = b'],"usage":' + msgspec.json.encode(self._streamed_usage.now()) + b"}\n\n"
        return b"data: " + self._encoder.prefix + choice + tail

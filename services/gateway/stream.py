"""Answers to requests: streamed as server-sent events, or collected and sent as one object.

The status is the engine's word: the headers of a stream wait until every prompt has been accepted, however late that
is, so a refusal has its own status and Retry-After even in a stream. What goes wrong later is sent as one event holding
the error, and `[DONE]`.

An accepted request may wait in the queue for long. While nothing is written a comment is sent now and then, lest a
proxy take the silence for an end. It is rare, for a client may not expect it: vLLM's benchmark strips the blank line
behind a comment that comes alone, and would take what follows for the same line. So the next event gets a blank
line before it, which ends the comment for such a reader, and is nothing to any other.

All rows that wait for one prompt are written together, one chunk a sample.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Protocol

import msgspec
from aiohttp import web

from services.gateway import faults
from services.gateway.config import GatewayConfig
from services.gateway.generation import Generation, Update, submit
from services.gateway.openai import StreamOptions
from services.gateway.serving import Gateway, Job
from services.gateway.usage import SentUsage, usage

COMMENT = b": keep-alive\n\n"
AFTER_COMMENT = b":\n\n"
DONE = b"data: [DONE]\n\n"
ALL_USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Choices(Protocol):
    """An endpoint's way to write chunks: the bytes of one choice, and of what comes around it."""

    @property
    def head(self) -> bytes:
        """A chunk up to its choices: `{"id": ..., "choices": [`"""

    def opening(self, index: int, generation: Generation) -> bytes:
        """What comes before the first text of a choice; b'' if nothing does."""

    async def prepare(self, position: int, generation: Generation) -> None:
        """Make ready what the first chunks of the prompt at `position` need and would keep the loop too long."""

    def choice(self, index: int, generation: Generation, update: Update) -> bytes:
        """The choice object of an update."""


async def collect(gateway: Gateway, jobs: Sequence[Job]) -> list[Generation]:
    """Runs all jobs to their ends. Raises what the first failing one raised."""
    async with gateway.lifecycle.running(), AsyncExitStack() as stack:
        generations = await _submit_all(stack, gateway, jobs)
        async with asyncio.TaskGroup() as tasks:
            for generation in generations:
                tasks.create_task(generation.finish())
    return generations


async def _submit_all(stack: AsyncExitStack, gateway: Gateway, jobs: Sequence[Job]) -> list[Generation]:
    """Enter the regions of all jobs. There may be a thousand, so other requests get their turn in between."""
    generations: list[Generation] = []
    for job in jobs:
        generations.append(await stack.enter_async_context(submit(gateway, job)))
        await asyncio.sleep(0)
    return generations


async def stream(
    request: web.Request, gateway: Gateway, jobs: Sequence[Job], choices: Choices, options: StreamOptions | None
) -> web.StreamResponse:
    """Runs all jobs, writing as they go. Raises only what can still be answered with a status."""
    writer = _Writer(request, choices, options, gateway.config)
    try:
        async with gateway.lifecycle.running(), AsyncExitStack() as stack:
            writer.generations = await _submit_all(stack, gateway, jobs)
            await writer.open()
            async with asyncio.TaskGroup() as tasks:
                comments = tasks.create_task(writer.keep_alive())
                await asyncio.wait([tasks.create_task(writer.pump(position)) for position in range(len(jobs))])
                comments.cancel()
            await writer.end()
    except Exception as error:
        await writer.fail(error)
    return writer.response


def _gone(error: BaseException) -> bool:
    """Whether `error` says that the client left."""
    if isinstance(error, BaseExceptionGroup):
        return all(_gone(one) for one in error.exceptions)
    return isinstance(error, ConnectionError)


class _Writer:
    """One stream. The pumps of its prompts share the response; each write is whole chunks."""

    def __init__(
        self, request: web.Request, choices: Choices, options: StreamOptions | None, config: GatewayConfig
    ) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self.generations: list[Generation] = []
        self._request = request
        self._choices = choices
        self._sent = SentUsage([])
        self._patience = config.sse_keep_alive_interval or math.inf
        options = ALL_USAGE if config.enable_force_include_usage else options or StreamOptions()
        self._usage = bool(options.include_usage)
        self._usage_always = self._usage and bool(options.continuous_usage_stats)
        self._silent = False  # nothing was written since the last look
        self._before = b""  # what comes before the next event

    async def open(self) -> None:
        """Send the headers once every prompt has been accepted. Raises a group of what those raise that were not."""
        async with asyncio.TaskGroup() as tasks:
            for generation in self.generations:
                tasks.create_task(generation.accepted())
        self._sent = SentUsage(self.generations)
        await self.response.prepare(self._request)

    async def keep_alive(self) -> None:
        """Write a comment whenever nothing else was written for a while, until cancelled."""
        while self._patience < math.inf:
            self._silent = True
            await asyncio.sleep(self._patience)
            if self._silent:
                self._before = AFTER_COMMENT
                await self.response.write(COMMENT)

    async def pump(self, position: int) -> None:
        """One prompt's updates, as they come, to its end.

        The opening chunks come with the first of them, since clients take the first chunk to show the first token.
        """
        generation = self.generations[position]
        base = position * len(generation.samples)
        updates = await self._updates(position)
        await self._choices.prepare(position, generation)
        opening = b"".join(
            self._chunk(self._choices.opening(base + at, generation)) for at in range(len(generation.samples))
        )
        while True:
            data = opening + b"".join(self._update(base + update.sample, generation, update) for update in updates)
            if data:
                await self.response.write(self._event(data))
            if generation.done:
                return
            updates, opening = await self._updates(position), b""

    async def _updates(self, position: int) -> list[Update]:
        generation = self.generations[position]
        updates = await generation.updates()
        self._sent.note_cached(position, generation.cached_tokens)
        return updates

    async def end(self) -> None:
        """The usage, if it is wanted, and the end."""
        last = b""
        if self._usage:
            whole = msgspec.json.encode(usage(self.generations))
            last = b"data: " + self._choices.head + b'],"usage":' + whole + b"}\n\n"
        await self.response.write(self._event(last + DONE))
        await self.response.write_eof()

    async def fail(self, error: Exception) -> None:
        """Tells the client, if the status is sent already and it is still there; otherwise raises `error`."""
        if _gone(error):
            return
        if not self.response.prepared:
            raise error
        with suppress(ConnectionError):
            failure = b"data: " + faults.body(faults.fault_of(error)) + b"\n\n"
            await self.response.write(self._event(failure + DONE))
            await self.response.write_eof()

    def _event(self, data: bytes) -> bytes:
        """Return what to write for whole events."""
        before, self._before, self._silent = self._before, b"", False
        return before + data

    def _update(self, index: int, generation: Generation, update: Update) -> bytes:
        if self._usage_always:
            self._sent.note_output(index, generation.samples[update.sample].shown_tokens)
        return self._chunk(self._choices.choice(index, generation, update))

    def _chunk(self, choice: bytes) -> bytes:
        if not choice:
            return b""
        tail = b"]}\n\n"
        if self._usage_always:
            tail = b'],"usage":' + msgspec.json.encode(self._sent.now()) + b"}\n\n"
        return b"data: " + self._choices.head + choice + tail

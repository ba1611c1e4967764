"""Answers to requests: streamed as server-sent events, or collected and sent as one object.

The status is decided before the first byte: the headers of a stream wait until every prompt's first rows are there,
or for a short grace if they wait in the engine's queue. A refusal comes at once, so it has its own status even in a
stream. What goes wrong later is sent as one event holding the error, and `[DONE]`.

All rows that wait for one prompt are written together, one chunk a sample.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Protocol

import msgspec
from aiohttp import web

from services.gateway import faults
from services.gateway.generation import Generation, Update, submit
from services.gateway.openai import StreamOptions
from services.gateway.serving import Gateway, Job
from services.gateway.usage import usage

GRACE = 0.25  # seconds
DONE = b"data: [DONE]\n\n"
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
    writer = _Writer(request, choices, options)
    try:
        async with gateway.lifecycle.running(), AsyncExitStack() as stack:
            writer.generations = await _submit_all(stack, gateway, jobs)
            async with asyncio.TaskGroup() as tasks:
                for position in range(len(jobs)):
                    tasks.create_task(writer.pump(position))
                await writer.open()
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

    def __init__(self, request: web.Request, choices: Choices, options: StreamOptions | None) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self.generations: list[Generation] = []
        self._request = request
        self._choices = choices
        self._usage = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and self._usage and bool(options.continuous_usage_stats)
        self._first = 0  # prompts whose first rows are there
        self._all_first = asyncio.Event()
        self._opened = asyncio.Event()

    async def open(self) -> None:
        """Sends the headers once every prompt has rows, or after the grace.

        Nothing comes with them: a comment, which would be allowed, makes vLLM's benchmark miss what follows.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await self._all_first.wait()
        await self.response.prepare(self._request)
        self._opened.set()

    async def pump(self, position: int) -> None:
        """One prompt's updates, as they come, to its end.

        The opening chunks come with the first of them, since clients take the first chunk to show the first token.
        """
        generation = self.generations[position]
        base = position * len(generation.samples)
        updates = await generation.updates()
        self._first += 1
        if self._first == len(self.generations):
            self._all_first.set()
        await self._choices.prepare(position, generation)
        await self._opened.wait()
        opening = b"".join(
            self._chunk(self._choices.opening(base + at, generation)) for at in range(len(generation.samples))
        )
        while True:
            data = opening + b"".join(
                self._chunk(self._choices.choice(base + update.sample, generation, update)) for update in updates
            )
            if data:
                await self.response.write(data)
            if generation.done:
                return
            updates, opening = await generation.updates(), b""

    async def end(self) -> None:
        """The usage, if it is wanted, and the end."""
        last = b""
        if self._usage:
            last = b"data: " + self._choices.head + b'],"usage":' + self._usage_now() + b"}\n\n"
        await self.response.write(last + DONE)
        await self.response.write_eof()

    async def fail(self, error: Exception) -> None:
        """Tells the client, if the status is sent already and it is still there; otherwise raises `error`."""
        if _gone(error):
            return
        if not self.response.prepared:
            raise error
        with suppress(ConnectionError):
            await self.response.write(b"data: " + faults.body(faults.fault_of(error)) + b"\n\n" + DONE)
            await self.response.write_eof()

    def _chunk(self, choice: bytes) -> bytes:
        if not choice:
            return b""
        tail = b'],"usage":' + self._usage_now() + b"}\n\n" if self._usage_always else b"]}\n\n"
        return b"data: " + self._choices.head + choice + tail

    def _usage_now(self) -> bytes:
        return msgspec.json.encode(usage(self.generations))

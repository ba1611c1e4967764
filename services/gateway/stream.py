"""Runs the prompts of a request, and streams their output as server-sent events or collects it.

The headers of a stream are sent when the engine has accepted every prompt, however long that takes, so that a refusal
has its own status and Retry-After. A later error is sent as an event, the last one.

An accepted request may wait in the queue for long. While nothing else is written, a comment is sent now and then, so
that proxies do not close the connection as idle. Comments are rare, since clients may not expect them: vLLM's benchmark
strips the blank line after a comment that comes alone, and would read the next event as part of the comment. So a blank
line is written before the next event. It ends the comment for such a reader, and other readers skip it.

All rows that have come for one prompt are written together, in one chunk for each sample. With an interval of k tokens,
a sample's first chunk is written at once, and each later one when k tokens have come since the one before, or the last.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Protocol

from aiohttp import web

from services.gateway import errors
from services.gateway.api_requests import StreamOptions
from services.gateway.bounds import MAX_LOGPROBS_AT_ONCE
from services.gateway.choice_events import ChoiceEvents, ChunkEncoder
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway, logged_id
from services.gateway.generation import Generation, Update, merge, submit
from services.gateway.prompt import PreparedPrompt
from shared.errors import InvalidRequest
from shared.params import SamplingParams
from shared.protocol import ProgressRow

COMMENT = b": keep-alive\n\n"
AFTER_COMMENT = b":\n\n"
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventEncoder(Protocol):
    """Encodes the events of a stream, each with its blank line. `index` is that of a sample among those of all prompts.

    All but the last two are called while the stream is written, and then one of them is.
    """

    def begin(self, generations: Sequence[Generation]) -> bytes:
        """Return what is sent as soon as all prompts are accepted."""

    async def prepare(self, prompt_index: int, generation: Generation) -> None:
        """Make what the first events of a prompt need, in a thread if it takes long."""

    def openings(self, index: int, generation: Generation) -> bytes:
        """Return what comes right before the first text of a sample."""

    def update(self, index: int, generation: Generation, update: Update) -> bytes:
        """Return the events of an update, which may be none."""

    def end(self) -> bytes:
        """Return what comes when all samples have ended."""

    def fail(self, error: ApiError) -> bytes:
        """Return the same when the stream ends with an error."""


async def collect(gateway: Gateway, prompts: Sequence[PreparedPrompt]) -> list[Generation]:
    """Run all prompts to their ends. Raise the exception of the first one that fails."""
    _check_logprobs(prompts, interval=None)
    async with AsyncExitStack() as stack:
        generations = await _submit_all(stack, gateway, prompts)
        async with asyncio.TaskGroup() as tasks:
            for generation in generations:
                tasks.create_task(generation.finish())
    return generations


def _check_logprobs(prompts: Sequence[PreparedPrompt], *, interval: int | None) -> None:
    """Raise `InvalidRequest` if too many log-probabilities of outputs could have to be held at once.

    A stream holds those of `interval` tokens of each sample; what is no stream, and a beam search, those of all.
    """
    numbers = (prompt.sampling.num_alternatives + 1 for prompt in prompts)  # -1: none
    count = sum(_num_held_tokens(prompt, interval) * number for prompt, number in zip(prompts, numbers, strict=True))
    if count > MAX_LOGPROBS_AT_ONCE:
        raise InvalidRequest(
            f"this asks for up to {count} log-probabilities at once (samples or beams, times max_tokens or a stream's "
            f"interval, times alternatives and the token itself), but at most {MAX_LOGPROBS_AT_ONCE} are held; a "
            "stream may have more",
            _alternatives_field(prompts[0].params),
        )


def _alternatives_field(params: SamplingParams) -> str:
    """Return the field that says what the alternatives of an output token are."""
    if params.logprob_token_ids:
        return "logprob_token_ids"
    return "logprobs" if params.top_logprobs is None else "top_logprobs"


def _num_held_tokens(prompt: PreparedPrompt, interval: int | None) -> int:
    max_tokens = prompt.sampling.max_tokens
    if prompt.beams is not None:
        return prompt.beams.width * max_tokens
    return prompt.params.n * (max_tokens if interval is None else min(interval, max_tokens))


async def _submit_all(stack: AsyncExitStack, gateway: Gateway, prompts: Sequence[PreparedPrompt]) -> list[Generation]:
    """Submit all prompts until `stack` closes. There may be a thousand, so other requests run in between."""
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
    """Run all prompts, and write their output in chunks of choices. Raise as `stream_events` does."""
    events = ChoiceEvents(encoder, options, all_usage=gateway.config.enable_force_include_usage)
    return await stream_events(request, gateway, prompts, events)


async def stream_events(
    request: web.Request, gateway: Gateway, prompts: Sequence[PreparedPrompt], encoder: EventEncoder
) -> web.StreamResponse:
    """Run all prompts, and write their output. Raise an error only if the status has not been sent yet."""
    interval = prompts[0].params.stream_interval or gateway.config.stream_interval  # the same for all of them
    _check_logprobs(prompts, interval=interval)
    writer = _StreamWriter(request, encoder, interval, gateway)
    try:
        with gateway.lifecycle.abortable():
            async with AsyncExitStack() as stack:
                await writer.open(await _submit_all(stack, gateway, prompts))
                async with asyncio.TaskGroup() as tasks:
                    comments = tasks.create_task(writer.keep_alive())
                    await asyncio.wait([tasks.create_task(writer.write(index)) for index in range(len(prompts))])
                    comments.cancel()
                await writer.end()
    except Exception as error:
        await writer.fail(error)
    return writer.response


def _is_disconnect(error: BaseException) -> bool:
    """Return whether `error` means that the client has left."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_disconnect, error.exceptions))
    return isinstance(error, ConnectionError)


class _Interval:
    """Holds the updates of one prompt's samples back until they are worth a chunk."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._num_sent: dict[int, int] = {}  # tokens of each sample until its last chunk
        self._held: dict[int, list[Update]] = {}

    def due(self, generation: Generation, updates: list[Update]) -> list[Update]:
        """Return one update for each sample that gets a chunk now."""
        due: list[Update] = []
        for update in updates:
            sample = generation.text.samples[update.sample]
            held = self._held.setdefault(update.sample, [])
            held.append(update)
            num_new = len(sample.token_ids) - self._num_sent.get(update.sample, -self._num_tokens)
            if num_new >= self._num_tokens or sample.finish_reason is not None:
                self._num_sent[update.sample] = len(sample.token_ids)
                due.append(merge(self._held.pop(update.sample)))
        return due


class _StreamWriter:
    """Writes one stream. The tasks of its prompts share the response, and each write is of whole chunks."""

    def __init__(self, request: web.Request, encoder: EventEncoder, interval: int, gateway: Gateway) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._generations: list[Generation] = []
        self._request = request
        self._encoder = encoder
        self._keep_alive_interval = gateway.config.sse_keep_alive_interval or math.inf
        self._interval = interval  # tokens of a chunk
        self._idle = False  # nothing was written since `keep_alive` last checked
        self._event_prefix = b""  # written before the next event
        self._writes = gateway.stream_writes
        self._protocol = request.protocol
        self._chunked = False  # whether the library has chosen the chunked encoding, which HTTP/1.0 has not

    async def open(self, generations: list[Generation]) -> None:
        """Send the headers once every prompt is accepted. Raise a group of exceptions if some are refused."""
        self._generations = generations
        async with asyncio.TaskGroup() as tasks:
            for generation in self._generations:
                tasks.create_task(generation.wait_accepted())
        first = self._encoder.begin(generations)
        await self.response.prepare(self._request)
        writer: Any = self._request.writer
        self._chunked = writer.chunked
        if first:
            self._write(first)

    async def keep_alive(self) -> None:
        """Write a comment whenever nothing else was written for an interval. Run until cancelled."""
        while self._keep_alive_interval < math.inf:
            self._idle = True
            await asyncio.sleep(self._keep_alive_interval)
            if self._idle:
                self._event_prefix = b""
                self._write(COMMENT)
                self._event_prefix = AFTER_COMMENT
                await self._request.writer.drain()

    async def write(self, prompt_index: int) -> None:
        """Write the updates of one prompt as they come, to its end, and wait while the client does not read.

        The openings are written with the first update, since clients take the first chunk for the first token.
        """
        generation = self._generations[prompt_index]
        num_samples = len(generation.text.samples)
        first = prompt_index * num_samples
        encode, interval = self._encoder.update, _Interval(self._interval) if self._interval > 1 else None
        events: list[bytes] = []

        def write(updates: list[Update]) -> None:
            for update in updates if interval is None else interval.due(generation, updates):
                events.append(encode(first + update.sample, generation, update))
            if data := b"".join(events):
                self._write(data)
            events.clear()

        def take(rows: list[ProgressRow]) -> bool:
            write(generation.read(rows))
            return not (generation.text.finished or self._protocol.writing_paused)

        updates = await generation.updates()
        await self._encoder.prepare(prompt_index, generation)
        events += [self._encoder.openings(first + index, generation) for index in range(num_samples)]
        write(updates)
        while not generation.text.finished:
            await self._request.writer.drain()
            await generation.follow(take)

    async def end(self) -> None:
        """Write the end of the stream."""
        self._write(self._encoder.end())
        await self._finish()

    async def fail(self, error: Exception) -> None:
        """Send `error` to the client, or raise it if no status was sent yet. Do neither if the client has left."""
        if _is_disconnect(error):
            return
        if not self.response.prepared:
            raise error
        with suppress(ConnectionError):
            self._write(self._encoder.fail(errors.to_api_error(error, logged_id(self._request))))
            await self._finish()

    async def _finish(self) -> None:
        self._writes.flush()
        await self.response.write_eof()

    def _write(self, data: bytes) -> None:
        """Write `data`, which is whole events, in the loop's next turn. Raise `ConnectionError` if the client has left.

        This does in one function what the library does in five, which takes a tenth of the time of a chunk.
        """
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        if self._event_prefix:
            data, self._event_prefix = self._event_prefix + data, b""
        self._idle = False
        self._writes.add(transport, b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

"""Sends one request, streams its answer and times it.

Times are taken when bytes have been read from the socket, before they are parsed. A *piece* is a chunk of the stream
that holds a token: text (of the answer, its reasoning or a tool call) or the finish reason. Every chunk of a completion
is a piece, since its token may have no visible text; a chat also has chunks without a token. The times to the first
piece and between pieces are what the client sees, however many tokens a server puts into one. The number of tokens is
taken from the server's usage.

An error of a request is recorded in its outcome, not raised.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import aiohttp
import msgspec
from msgspec import Meta, Struct

from quire.bench.lines import Lines
from quire.bench.workload import Request

MAX_ERROR_LENGTH = 500
"""Characters of a server's error that are shown."""

MAX_ERROR_BODY = 64 * 1024
"""Bytes of an error response that are read, about."""

TEXT_FIELDS = ("text", "thinking", "function", "name", "arguments")
"""Fields of the objects in a delta that hold text from the model."""

END_TIMEOUT = 0.25
"""Seconds to wait for the end of the response after [DONE]. Without it, the connection is not reused."""


class Outcome(Struct):
    """The result of a request. Times are seconds; `started` is a value of `time.perf_counter`."""

    prompt_len: int  # tokens
    ok: bool = False
    error: str = ""
    started: float = 0.0
    queued: float = 0.0  # from its time of arrival until it was sent
    ttft: float = 0.0
    itls: list[float] = []  # times between pieces
    latency: float = 0.0  # from `started` to the last piece
    output_tokens: int = 0  # 0 if the server does not say
    text: str = ""
    other_text: str = ""  # reasoning and tool calls


class Target(NamedTuple):
    """The URL of the requests, and what they have in common."""

    url: str
    chat: bool
    model: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    timeout: float  # seconds without a token after which a request fails


class _Delta(Struct):
    """One chunk's part of a chat message. Servers agree on `content` only."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None  # the older name
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None

    @property
    def other_text(self) -> str:
        """Return the text that is not content: reasoning, a refusal and tool calls."""
        reasoning = self.reasoning or self.reasoning_content  # some servers send both, with the same text
        has_text = reasoning or self.refusal or self.tool_calls or self.function_call
        return join_text([reasoning, self.refusal, self.tool_calls, self.function_call]) if has_text else ""


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


Count = Annotated[int, Meta(ge=0, le=2**40)]


class _Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def send(session: aiohttp.ClientSession, target: Target, request: Request, id: str) -> Outcome:
    """Send a request and read its stream to the end."""
    outcome = Outcome(prompt_len=request.prompt_len)
    stream = Stream(outcome)
    headers = {**target.headers, "X-Request-Id": id}
    content = msgspec.json.encode(payload(target, request))
    outcome.started = time.perf_counter()
    limit = asyncio.timeout(target.timeout)
    try:
        async with limit, session.post(target.url, data=content, headers=headers) as response:
            if response.status != 200:
                outcome.error = (
                    f"HTTP {response.status}: {error_message(await read_beginning(response, MAX_ERROR_BODY))}"
                )
                return outcome
            await _read_stream(response, stream, limit, target.timeout)
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:  # a timeout is an OSError
        name = type(error).__name__
        outcome.error = f"no token for {target.timeout:g} s" if limit.expired() else one_line(f"{name}: {error}")
        return outcome
    stream.end(response.content_type)
    return outcome


async def _read_stream(
    response: aiohttp.ClientResponse, stream: "Stream", limit: asyncio.Timeout, seconds: float
) -> None:
    """Read a stream up to its [DONE] or its end. Each token moves `limit` to `seconds` from now."""
    async for data in response.content.iter_any():
        now = time.perf_counter()
        if stream.feed(data, now):
            limit.reschedule(asyncio.get_running_loop().time() + seconds)
        if stream.done:
            break
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(END_TIMEOUT):
            async for _ in response.content.iter_any():
                pass


async def read_beginning(response: aiohttp.ClientResponse, max_size: int) -> bytes:
    """Return the beginning of a response: about `max_size` bytes, or all if there are fewer."""
    content = bytearray()
    async for data in response.content.iter_any():
        content += data
        if len(content) >= max_size:
            break
    return bytes(content)


def payload(target: Target, request: Request) -> dict[str, Any]:
    """Return the fields of a request's body."""
    fields: dict[str, Any] = (
        {"messages": [{"role": "user", "content": request.prompt}], "max_completion_tokens": request.output_len}
        if target.chat
        else {"prompt": request.prompt, "max_tokens": request.output_len}
    )
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": target.model, **fields, **streaming, **target.body}


def error_message(body: bytes) -> str:
    """Return the message in the body of an error response, or else the beginning of the body, in one line."""
    try:
        error = msgspec.json.decode(body)["error"]
        return one_line(str(error["message"] if isinstance(error, dict) else error))
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return one_line(body[: 4 * MAX_ERROR_LENGTH].decode(errors="replace"))


def one_line(text: str) -> str:
    """Return the beginning of `text` as one printable line of at most `MAX_ERROR_LENGTH` characters."""
    printable = "".join(character if character.isprintable() else " " for character in text[: 4 * MAX_ERROR_LENGTH])
    return " ".join(printable.split())[:MAX_ERROR_LENGTH]


class Stream:
    """Parses the server-sent events of one response and records them in its outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.done = False  # [DONE] has come, and nothing comes after it
        self._outcome = outcome
        self._lines = Lines()
        self._beginning = b""  # of the response, until an event has come
        self._has_events = False
        self._last_piece = 0.0  # time of the last piece; 0: none yet
        self._finished = False  # a finish reason or [DONE] has come
        outcome.itls = []

    def feed(self, data: bytes, now: float) -> bool:
        """Parse bytes that came at time `now` (seconds). Return whether they hold a token.

        Raise `ValueError` if an event is not a chunk, and `RecursionError` if it is nested too deeply.
        """
        before = len(self._outcome.itls), self._last_piece
        if not self._has_events and len(self._beginning) < 4 * MAX_ERROR_LENGTH:
            self._beginning += data[: 4 * MAX_ERROR_LENGTH]
        for line in self._lines.feed(data):
            if line.startswith(b"data:"):  # other lines are comments, blank or other fields
                self._has_events = True
                self._take_event(line[5:].strip(), now)
        return before != (len(self._outcome.itls), self._last_piece)

    def end(self, content_type: str) -> None:
        """Record in the outcome whether the response was a whole stream."""
        outcome = self._outcome
        if outcome.error:
            return
        if not self._has_events and content_type != "text/event-stream":
            outcome.error = f"not a stream but a response of type {content_type}: {error_message(self._beginning)}"
        elif not self._last_piece:
            outcome.error = "the stream held no token"
        elif not self._finished:
            outcome.error = "the stream broke off"
        else:
            outcome.ok = True

    def _take_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._finished = self.done = True
            return
        chunk, outcome = _decode(data), self._outcome
        if chunk.error is not None:
            outcome.error = outcome.error or error_message(data)
        if chunk.usage is not None:
            outcome.output_tokens = chunk.usage.completion_tokens or outcome.output_tokens
            outcome.prompt_len = chunk.usage.prompt_tokens or outcome.prompt_len
        has_token = [self._take_choice(choice) for choice in chunk.choices or ()]
        if any(has_token):
            self._record_piece(now)

    def _take_choice(self, choice: _Choice) -> bool:
        """Record one choice of a chunk. Return whether it holds a token."""
        text, other_text = choice.text or "", ""
        if choice.delta is not None:
            text += join_text(choice.delta.content)
            other_text = choice.delta.other_text
        self._outcome.text += text
        if other_text:
            self._outcome.other_text += other_text
        finished = bool(choice.finish_reason)  # some servers write '' in the other chunks
        self._finished = self._finished or finished
        return bool(text or other_text or finished or choice.text is not None)

    def _record_piece(self, now: float) -> None:
        outcome = self._outcome
        if self._last_piece:
            outcome.itls.append(now - self._last_piece)
        else:
            outcome.ttft = now - outcome.started
        self._last_piece = now
        outcome.latency = now - outcome.started


def join_text(value: Any) -> str:
    """Return all text in a part of a delta: a string, or objects and lists that hold strings."""
    match value:
        case str():
            return value
        case list():
            return "".join(map(join_text, value))
        case dict():
            return "".join(join_text(value.get(name)) for name in TEXT_FIELDS)
    return ""

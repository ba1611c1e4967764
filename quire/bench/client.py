"""Sends one request, streams its answer and times it.

Times are taken when bytes leave the socket, before they are parsed. A *piece* is a chunk of the stream with a token in
it: one with words (of the answer, its reasoning or a tool call), or the one that ends the answer. A chat's other chunks
hold no token; a completion's hold one whose text is hidden. The times to the first piece and between pieces are what
the client sees, however many tokens a server puts into one. The server's own usage says how many tokens there were.

Errors of a request are part of its outcome and never raised.
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

SHOWN = 500
"""Characters shown of a server's error."""

REFUSAL = 64 * 1024
"""Bytes read of a refusal."""

WORDED = ("text", "thinking", "function", "name", "arguments")
"""Fields of a delta's objects whose strings the model wrote."""

END_TIMEOUT = 0.25
"""Seconds from [DONE] to the end of the response; later, the connection is not reused."""


class Outcome(Struct):
    """The result of a request. Times are seconds, `started` on the clock of `time.perf_counter`."""

    prompt_len: int
    ok: bool = False
    error: str = ""
    started: float = 0.0
    queued: float = 0.0  # seconds it waited before it was sent
    ttft: float = 0.0
    itls: list[float] = []  # between pieces
    latency: float = 0.0  # from start to last piece
    output_tokens: int = 0  # 0 if the server does not say
    text: str = ""
    aside: str = ""  # words beside the text: reasoning, and calls of tools


class Target(NamedTuple):
    """The address of requests, and all that they have in common."""

    url: str
    chat: bool
    model: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    timeout: float  # seconds without a token


class _Delta(Struct):
    """The part of a chat's answer in one chunk. Servers differ in all but the content."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None  # the older name
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None

    @property
    def aside(self) -> str:
        """The words beside the answer's text."""
        reasoning = self.reasoning or self.reasoning_content  # some servers send both, with the same words
        has_words = reasoning or self.refusal or self.tool_calls or self.function_call
        return words([reasoning, self.refusal, self.tool_calls, self.function_call]) if has_words else ""


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
                outcome.error = f"HTTP {response.status}: {error_message(await beginning(response, REFUSAL))}"
                return outcome
            await _take(response, stream, limit, target.timeout)
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:  # a timeout is an OSError
        name = type(error).__name__
        outcome.error = f"no token for {target.timeout:g} s" if limit.expired() else one_line(f"{name}: {error}")
        return outcome
    stream.end(response.content_type)
    return outcome


async def _take(response: aiohttp.ClientResponse, stream: "Stream", limit: asyncio.Timeout, seconds: float) -> None:
    """Read a stream up to its [DONE] or its end; each token moves the limit."""
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


async def beginning(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the beginning of a response: about `most` bytes, or all if there are fewer."""
    content = bytearray()
    async for data in response.content.iter_any():
        content += data
        if len(content) >= most:
            break
    return bytes(content)


def payload(target: Target, request: Request) -> dict[str, Any]:
    """Return the body of a request."""
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": request.prompt}], "max_completion_tokens": request.output_len}
        if target.chat
        else {"prompt": request.prompt, "max_tokens": request.output_len}
    )
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": target.model, **asked, **usage, **target.body}


def error_message(body: bytes) -> str:
    """Return the message in the body of a refusal, or the beginning of the body, in one line."""
    try:
        error = msgspec.json.decode(body)["error"]
        return one_line(str(error["message"] if isinstance(error, dict) else error))
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return one_line(body[: 4 * SHOWN].decode(errors="replace"))


def one_line(text: str) -> str:
    """Return the beginning of a text as one line that a terminal can show."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * SHOWN])
    return " ".join(printable.split())[:SHOWN]


class Stream:
    """Turns server-sent events into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.done = False  # [DONE] has come: nothing will come behind it
        self._outcome = outcome
        self._lines = Lines()
        self._head = b""  # what the answer begins with, until there is an event
        self._events = False
        self._last = 0.0  # time of the last piece
        self._finished = False
        outcome.itls = []

    def feed(self, data: bytes, now: float) -> bool:
        """Take bytes that came at time `now`; return whether they hold a token.

        Raise `ValueError` for what is not a chunk, `RecursionError` for one too deep.
        """
        before = len(self._outcome.itls), self._last
        if not self._events and len(self._head) < 4 * SHOWN:
            self._head += data[: 4 * SHOWN]
        for line in self._lines.feed(data):
            if line.startswith(b"data:"):  # all else is comments, blank lines and other fields
                self._events = True
                self._take(line[5:].strip(), now)
        return before != (len(self._outcome.itls), self._last)

    def end(self, content_type: str) -> None:
        """Note the end of the response, and in the outcome whether it was a whole stream."""
        outcome = self._outcome
        if outcome.error:
            return
        if not self._events and content_type != "text/event-stream":
            outcome.error = f"no stream but an answer of type {content_type}: {error_message(self._head)}"
        elif not self._last:
            outcome.error = "the stream held no token"
        elif not self._finished:
            outcome.error = "the stream broke off"
        else:
            outcome.ok = True

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._finished = self.done = True
            return
        chunk, outcome = _decode(data), self._outcome
        if chunk.error is not None:
            outcome.error = outcome.error or error_message(data)
        if chunk.usage is not None:
            outcome.output_tokens = chunk.usage.completion_tokens or outcome.output_tokens
            outcome.prompt_len = chunk.usage.prompt_tokens or outcome.prompt_len
        taken = [self._choose(choice) for choice in chunk.choices or ()]
        if any(taken):
            self._piece(now)

    def _choose(self, choice: _Choice) -> bool:
        """Take one choice of a chunk. Return whether it holds a token."""
        text, aside = choice.text or "", ""
        if choice.delta is not None:
            text += words(choice.delta.content)
            aside = choice.delta.aside
        self._outcome.text += text
        if aside:
            self._outcome.aside += aside
        ends = bool(choice.finish_reason)  # some servers write '' while they go on
        self._finished = self._finished or ends
        return bool(text or aside or ends or choice.text is not None)

    def _piece(self, now: float) -> None:
        outcome = self._outcome
        if self._last:
            outcome.itls.append(now - self._last)
        else:
            outcome.ttft = now - outcome.started
        self._last = now
        outcome.latency = now - outcome.started


def words(value: Any) -> str:
    """Return all words in a part of a delta: a string, or objects and lists that hold strings."""
    match value:
        case str():
            return value
        case list():
            return "".join(map(words, value))
        case dict():
            return "".join(words(value.get(name)) for name in WORDED)
    return ""

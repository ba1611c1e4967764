"""One request, streamed and timed.

Times are taken when bytes come out of the socket, before they are looked at: what came in one piece came at one time.
A *piece* is a chunk of the stream with a token in it; the time to the first, and the times between, are what the
client sees, however many tokens a server puts into one. How many tokens there were, the server's own usage says.

Whatever goes wrong with a request is part of its outcome, and never raised.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec
from msgspec import Struct

from quire.bench.workload import Request


class Outcome(Struct):
    """What became of a request. Times are seconds, `started` on the clock of `time.perf_counter`."""

    prompt_len: int
    ok: bool = False
    error: str = ""
    started: float = 0.0
    queued: float = 0.0  # waited for its turn before it was sent
    ttft: float = 0.0
    itls: list[float] = []  # between pieces
    latency: float = 0.0  # from start to last piece
    output_tokens: int = 0  # 0 if the server does not say
    text: str = ""


class Target(NamedTuple):
    """Where requests go, and what all of them have in common."""

    url: str
    chat: bool
    model: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class _Delta(Struct):
    role: str | None = None
    content: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def send(session: aiohttp.ClientSession, target: Target, request: Request, id: str) -> Outcome:
    """Send a request and take its stream to the end."""
    outcome = Outcome(prompt_len=request.prompt_len)
    stream = Stream(outcome)
    headers = {**target.headers, "X-Request-Id": id}
    content = msgspec.json.encode(payload(target, request))
    outcome.started = time.perf_counter()
    try:
        async with session.post(target.url, data=content, headers=headers) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {said(await response.read())}"
                return outcome
            async for data in response.content.iter_any():
                stream.feed(data, time.perf_counter())
    except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:  # a timeout is an OSError
        outcome.error = f"{type(error).__name__}: {error}"
        return outcome
    stream.end()
    return outcome


def payload(target: Target, request: Request) -> dict[str, Any]:
    """The body of a request."""
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": request.prompt}], "max_completion_tokens": request.output_len}
        if target.chat
        else {"prompt": request.prompt, "max_tokens": request.output_len}
    )
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": target.model, **asked, **usage, **target.body}


def said(body: bytes) -> str:
    """The message in the body of a refusal, or the body itself."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:500].decode(errors="replace")


class Stream:
    """Server-sent events into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._begun = b""  # of a line whose end has not come
        self._last = 0.0  # time of the last piece
        self._finished = False
        outcome.itls = []

    def feed(self, data: bytes, now: float) -> None:
        """Bytes that came `now`. Raises msgspec's `DecodeError` for what is not a chunk."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # all else is comments, blank lines and other fields
                self._take(line[5:].strip(), now)

    def end(self) -> None:
        """The connection was closed in good order; whether the stream was whole."""
        outcome = self._outcome
        if outcome.error:
            return
        if not self._last:
            outcome.error = "the stream held no token"
        elif not self._finished:
            outcome.error = "the stream broke off"
        else:
            outcome.ok = True

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._finished = True
            return
        chunk, outcome = _decode(data), self._outcome
        if chunk.error is not None:
            outcome.error = outcome.error or said(data)
        if chunk.usage is not None:
            outcome.output_tokens = chunk.usage.completion_tokens or outcome.output_tokens
            outcome.prompt_len = chunk.usage.prompt_tokens or outcome.prompt_len
        pieces = [choice for choice in chunk.choices or () if not opens(choice)]
        for choice in pieces:
            outcome.text += choice.text or (choice.delta and choice.delta.content) or ""
            self._finished = self._finished or choice.finish_reason is not None
        if pieces:
            self._piece(now)

    def _piece(self, now: float) -> None:
        outcome = self._outcome
        if self._last:
            outcome.itls.append(now - self._last)
        else:
            outcome.ttft = now - outcome.started
        self._last = now
        outcome.latency = now - outcome.started


def opens(choice: _Choice) -> bool:
    """Whether it only names the role, as a chat's first chunk does: no token is in it, and it may come before any."""
    delta = choice.delta
    return delta is not None and delta.role is not None and not delta.content and choice.finish_reason is None

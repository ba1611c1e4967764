"""Clients of a whole server, its metrics, and the replies of its scripted model.

`Exchange` is one HTTP exchange on its own socket, and shows what client libraries hide: when bytes arrive and how
connections end. The model answers a prompt that contains ENDLESS or BRIEF with a reply of the script, and a chat with
tokens that depend on all tokens before them (`CHAIN`).
"""

import asyncio
import json
import socket
import struct
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.fakes import events, texts
from tests.scripted_worker import CHAIN, Reply, Script, expected_chain
from tests.text.vocabulary import make_tokenizer
from tests.waiting import PATIENCE

TOKENIZER = make_tokenizer()
MODEL = "tiny"
ENDLESS, BRIEF = (TOKENIZER.encode(word)[0] for word in ("view", "port"))
TALK = Script(
    vocab_size=TOKENIZER.vocab_size,
    eos=TOKENIZER.eos_token_ids[0],
    blocks=1024,
    replies=[
        Reply([ENDLESS], TOKENIZER.encode(" two") * 2000),
        Reply([BRIEF], TOKENIZER.encode("one two three")),
    ],
)
assert TOKENIZER.encode("<|im_start|>") == [CHAIN]  # so that every chat prompt begins with CHAIN


def talk(**changes: Any) -> Script:
    """Return the script of a server, with changes."""
    return msgspec.structs.replace(TALK, **changes)


def chained(prompt: Sequence[int], count: int, adapter: int = 0) -> str:
    """Return the model's answer to a prompt that begins with CHAIN and contains neither ENDLESS nor BRIEF."""
    return TOKENIZER.decode(expected_chain(list(prompt), count, vocab_size=TALK.vocab_size, adapter=adapter))


class Listening(Protocol):
    """An HTTP server on this machine."""

    @property
    def port(self) -> int: ...


class Exchange:
    """One exchange. Read its `status` first, then each `event` or the `rest`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.headers: dict[str, str] = {}
        self._reader, self._writer = reader, writer
        self._read = b""  # part of the body not yet returned

    async def status(self) -> int:
        """Wait for the head of the answer; return the status."""
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return int(status.split()[1])

    async def event(self) -> str:
        """Return the next event or comment of a stream; empty at the end."""
        while b"\n\n" not in self._read:
            more = await self._more()
            if not more:
                return ""
            self._read += more
        event, self._read = self._read.split(b"\n\n", 1)
        return event.decode()

    async def rest(self) -> str:
        """Return the rest of the body."""
        if "content-length" in self.headers:
            return (await self._reader.readexactly(int(self.headers["content-length"]))).decode()
        if "transfer-encoding" not in self.headers:
            return (await self._reader.read()).decode()
        while more := await self._more():
            self._read += more
        return self._read.decode()

    async def leave(self) -> None:
        """Close cleanly with a FIN in both directions. The system answers later bytes with a RST."""
        self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    async def reset(self) -> None:
        """Close with a RST."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def _more(self) -> bytes:
        """Return the next chunk of the body; empty after the last."""
        size = int(await self._reader.readline(), 16)
        return (await self._reader.readexactly(size + 2))[:size]


@asynccontextmanager
async def wire(at: Listening, path: str, body: dict[str, Any] | None = None) -> AsyncIterator[Exchange]:
    """Send a GET, or a POST of `body`, and yield the exchange. Close its connection at the end of the block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
    content = b"" if body is None else json.dumps({"model": MODEL} | body).encode()
    method, length = "GET" if body is None else "POST", len(content)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + content)
        async with asyncio.timeout(2 * PATIENCE):
            yield Exchange(reader, writer)
    finally:
        writer.transport.abort()


class Answer(Struct):
    """A complete response."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        """Return the error object after checking its shape."""
        (error,) = self.json.values()
        assert list(self.json) == ["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        return error


async def ask(at: Listening, path: str, **body: Any) -> Answer:
    """Return the response to a POST of `body`, or to a GET if it is empty. The events of a stream are one text."""
    async with wire(at, path, body or None) as exchange:
        status = await exchange.status()
        return Answer(status, exchange.headers, await exchange.rest())


async def complete(at: Listening, prompt: Any, max_tokens: int, **fields: Any) -> Answer:
    return await ask(at, "/v1/completions", prompt=prompt, max_tokens=max_tokens, **fields)


async def post_drain(port: int) -> int:
    """Return the status of POST /drain at an admin port, which is the answer's once the service has drained."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/drain", method="POST")

    def post() -> int:
        try:
            with urllib.request.urlopen(request, timeout=2 * PATIENCE) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    return await asyncio.to_thread(post)


def text_of(answer: Answer) -> str:
    """Return the text of a completion, whether it was streamed or not."""
    if answer.text.startswith("{"):
        return str(answer.json["choices"][0]["text"])
    return texts(events(answer.text))[0]


@asynccontextmanager
async def streaming(at: Listening, prompt: Any, max_tokens: int = 1000, **fields: Any) -> AsyncIterator[Exchange]:
    """Open a stream; yield it once the server has accepted it."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True} | fields
    async with wire(at, "/v1/completions", body) as exchange:
        status = await exchange.status()
        assert status == 200, f"{status}: {await exchange.rest()}"
        yield exchange


def client(at: Listening, **options: Any) -> AsyncOpenAI:
    """Return the official client, without retries."""
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{at.port}/v1", api_key="any", max_retries=0, **options)


def says(content: str) -> list[Any]:
    """Return the messages of a chat."""
    return [{"role": "user", "content": content}]


Figures = defaultdict[str, float]
SAMPLES, SEQUENCES = (
    "vllm:request_success_total",
    "quire:sequences_finished_total",
)  # the counters of finished samples: the gateway's and the engine's


async def figures(at: Listening) -> Figures:
    """Return the values of /metrics. Those with a reason or a status have it in their names: `name:reason`."""
    answer = await ask(at, "/metrics")
    assert answer.status == 200
    values = Figures(float)
    for family in text_string_to_metric_families(answer.text):
        for name, labels, value, *_ in family.samples:
            reason = labels.get("finished_reason") or labels.get("code")
            values[f"{name}:{reason}" if reason else name] += value
    return values


def change(since: Figures, now: Figures) -> Figures:
    """Return how much each figure grew."""
    return Figures(float, {name: value - since[name] for name, value in now.items()})


def idle(now: Figures) -> bool:
    """Return whether the engine's gauges say that it holds nothing."""
    busy = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "quire:steps_in_flight",
        "vllm:kv_cache_usage_perc",
    )
    return not any(now[name] for name in busy) and now["quire:kv_blocks_free"] == now["quire:kv_blocks"] > 0


async def settled(at: Listening, since: Figures | None = None, requests: int = 0) -> Figures:
    """Wait until at least `requests` samples have ended since then, and the engine holds nothing.

    Return how much each figure grew. An engine's figures are up to a quarter of a second old; they are recent
    enough when they count as many ends as the gateway, whose own are current.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            now = await figures(at)
            grown = change(since or Figures(float), now)
            enough = sum(ended(grown, SAMPLES).values()) >= requests
            by_engine, by_gateway = sum(ended(now, SEQUENCES).values()), sum(ended(now, SAMPLES).values())
            if enough and idle(now) and by_engine == by_gateway == now["quire:requests_accepted_total"]:
                return grown
            await asyncio.sleep(0.03)


def ended(values: Figures, name: str) -> dict[str, float]:
    """Return a counter of ends by reason, without zeros."""
    prefix = name + ":"
    return {key.removeprefix(prefix): value for key, value in values.items() if value and key.startswith(prefix)}

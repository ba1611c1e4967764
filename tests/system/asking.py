"""Clients of a whole server: its wire as it is, its figures, and the words of its scripted model.

`Wire` is one HTTP exchange on a socket of its own, for what clients' libraries hide or tidy up: when bytes come, how
connections end. The model answers prompts that contain one of the words below with a reply of the script, and
others that begin like a chat with tokens that depend on all before them (`CHAIN`).
"""

import asyncio
import json
import socket
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.scripted import CHAIN, Reply, Script, expected_chain
from tests.system.running import PATIENCE
from tests.text.vocabulary import make_tokenizer

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
assert TOKENIZER.encode("<|im_start|>") == [CHAIN]  # so that chats are chains


def talk(**changes: Any) -> Script:
    """The script of a server, with changes."""
    return msgspec.structs.replace(TALK, **changes)


def chained(prompt: Sequence[int], count: int) -> str:
    """What the model says to a prompt that begins with CHAIN and has none of the words."""
    return TOKENIZER.decode(expected_chain(list(prompt), count, vocab_size=TALK.vocab_size))


class Listening(Protocol):
    """Whatever serves HTTP on this machine."""

    @property
    def port(self) -> int: ...


class Wire:
    """One exchange. Take its `status` first, then its `event`s or its `rest`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.headers: dict[str, str] = {}
        self._reader, self._writer = reader, writer
        self._read = b""  # of the body, not yet handed out

    async def status(self) -> int:
        """Waits for the head of the answer."""
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return int(status.split()[1])

    async def event(self) -> str:
        """The next event or comment of a stream, as it comes; empty at the end."""
        while b"\n\n" not in self._read:
            more = await self._more()
            if not more:
                return ""
            self._read += more
        event, self._read = self._read.split(b"\n\n", 1)
        return event.decode()

    async def rest(self) -> str:
        """What is left of the body, to its end."""
        if "content-length" in self.headers:
            return (await self._reader.readexactly(int(self.headers["content-length"]))).decode()
        if "transfer-encoding" not in self.headers:
            return (await self._reader.read()).decode()
        while more := await self._more():
            self._read += more
        return self._read.decode()

    async def leave(self) -> None:
        """Go cleanly: FIN, in both directions. What comes after it is answered by the system with a RST."""
        self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    async def reset(self) -> None:
        """Go with a RST."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def _more(self) -> bytes:
        """The next chunk of the body; empty behind the last."""
        size = int(await self._reader.readline(), 16)
        return (await self._reader.readexactly(size + 2))[:size]


@asynccontextmanager
async def wire(at: Listening, path: str, body: dict[str, Any] | None = None) -> AsyncIterator[Wire]:
    """A request that has been sent: a GET, or a POST of a body. Its connection is closed with the block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
    content = b"" if body is None else json.dumps({"model": MODEL} | body).encode()
    method, length = "GET" if body is None else "POST", len(content)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + content)
        async with asyncio.timeout(2 * PATIENCE):
            yield Wire(reader, writer)
    finally:
        writer.transport.abort()


class Answer(Struct):
    """A whole answer."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        """The error object, whose shape is checked."""
        (error,) = self.json.values()
        assert list(self.json) == ["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        return error


async def ask(at: Listening, path: str, **body: Any) -> Answer:
    """The answer to a POST of the body, or to a GET if there is none. Of a stream: its events as one text."""
    async with wire(at, path, body or None) as exchange:
        status = await exchange.status()
        return Answer(status, exchange.headers, await exchange.rest())


async def complete(at: Listening, prompt: Any, max_tokens: int, **fields: Any) -> Answer:
    return await ask(at, "/v1/completions", prompt=prompt, max_tokens=max_tokens, **fields)


@asynccontextmanager
async def streaming(at: Listening, prompt: Any, max_tokens: int = 1000, **fields: Any) -> AsyncIterator[Wire]:
    """A stream that the server has accepted."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True} | fields
    async with wire(at, "/v1/completions", body) as exchange:
        assert await exchange.status() == 200
        yield exchange


def client(at: Listening, **options: Any) -> AsyncOpenAI:
    """The official client, without retries."""
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{at.port}/v1", api_key="any", max_retries=0, **options)


def says(content: str) -> list[Any]:
    """Messages of a chat."""
    return [{"role": "user", "content": content}]


Figures = defaultdict[str, float]
SAMPLES, SEQUENCES = "vllm:request_success_total", "quire:sequences_finished_total"  # as gateway and engine count ends


async def figures(at: Listening) -> Figures:
    """The samples of /metrics; those that differ by a reason or a status as `name:reason`."""
    answer = await ask(at, "/metrics")
    assert answer.status == 200
    found = Figures(float)
    for family in text_string_to_metric_families(answer.text):
        for name, labels, value, *_ in family.samples:
            kind = labels.get("finished_reason") or labels.get("code")
            found[f"{name}:{kind}" if kind else name] += value
    return found


def change(since: Figures, now: Figures) -> Figures:
    """How much each figure grew."""
    return Figures(float, {name: value - since[name] for name, value in now.items()})


def idle(now: Figures) -> bool:
    """Whether an engine holds nothing, by its own word."""
    busy = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "quire:steps_in_flight",
        "vllm:kv_cache_usage_perc",
    )
    return not any(now[name] for name in busy) and now["quire:kv_blocks_free"] == now["quire:kv_blocks"] > 0


async def settled(at: Listening, since: Figures | None = None, requests: int = 0) -> Figures:
    """Waits until so many samples or more have ended since then, and nothing of anything is held any more.

    Returns how much each figure grew. An engine's figures are up to a quarter of a second old; they are new enough
    when they count as many ends as the gateway, whose own are of this moment.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            now = await figures(at)
            grown = change(since or Figures(float), now)
            enough = sum(ended(grown, SAMPLES).values()) >= requests
            there, here = sum(ended(now, SEQUENCES).values()), sum(ended(now, SAMPLES).values())
            if enough and idle(now) and there == here == now["quire:requests_accepted_total"]:
                return grown
            await asyncio.sleep(0.03)


def ended(found: Figures, name: str) -> dict[str, float]:
    """One of the counters of ends, by the reason; what never happened is left out."""
    return {key.removeprefix(name + ":"): value for key, value in found.items() if value and key.startswith(name + ":")}

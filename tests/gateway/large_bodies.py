"""Request bodies of many shapes, as large as a gateway accepts, and a measure of how long they block its loop."""

import asyncio
import http.client
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'

ITEMS = {
    "digits": b"1,",
    "ids": b"12345, ",
    "lists": b"[1],",
    "empty lists": b"[],",
    "objects": b"{},",
    "strings": b'"",',
    "texts": b'"hello, world",',
    "nulls": b"null,",
    "floats": b"1.2345678901234567890123e-300,",
    "messages": b'{"role":"user","content":"x"},',
    "parts": b'{"role":"user","content":[{"type":"text","text":"x"}]},',
}
"""Items to fill lists with."""

TEXTS = {
    "letters": b"a",
    "words": b"hello, world [1], ",
    "escapes": b"\\u0041",
    "accents": b"\\u00e9",
    "characters": "é".encode(),
    "quotes": b'\\"',
    "backslashes": b"\\\\",
    "newlines": b"\\n",
}
"""Text to fill strings with."""

LISTS = (
    *("prompt", "messages", "stop", "stop_token_ids", "allowed_token_ids", "bad_words"),
    *("tools", "documents", "unknown"),
    *("responses.input", "responses.tools", "responses.include"),
)
OBJECTS = (
    *("chat_template_kwargs", "logit_bias", "metadata", "response_format", "stream_options", "unknown"),
    *("responses.metadata", "responses.text"),
)
STRINGS = (
    *("prompt", "content", "model", "user", "stop", "cache_salt", "key"),
    *("responses.input", "responses.instructions", "responses.user"),
)


def bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, path, body), each of nearly `size` bytes: fields of all kinds, filled with values of all kinds."""
    for field, (name, item) in itertools.product(LISTS, ITEMS.items()):
        yield f"{field}: {name}", *_body(field, b"[" + _fill(item, size)[:-1] + b"]")
    for field in OBJECTS:
        yield f"{field}: keys", *_body(field, _keys(size))
        yield f"{field}: lists", *_body(field, b'{"a":[' + _fill(b"[],", size)[:-1] + b"]}")
        yield f"{field}: one key", *_body(field, b"{" + _fill(b'"1":1,', size)[:-1] + b"}")
    for field, (name, text) in itertools.product(STRINGS, TEXTS.items()):
        yield f"{field}: {name}", *_body(field, b'"' + _fill(text, size) + b'"')
    for name, number in (("digits", b"1" * (size - 200)), ("fraction", b"0." + b"1" * (size - 200))):
        yield f"temperature: {name}", *_body("temperature", number)
        yield f"unknown: {name}", *_body("unknown", number)
    yield "depth", *_body("unknown", b"[" * (size - 200))
    yield "fields", CHAT, b"{" + MESSAGES + b"," + _keys(size)[1:]
    yield "one field", CHAT, b"{" + MESSAGES + b"," + _fill(b'"unknown":[],', size)[:-1] + b"}"
    yield "spaces", CHAT, b" " * (size - 200) + b"{" + MESSAGES + b"}"


def _fill(item: bytes, size: int) -> bytes:
    return item * ((size - 200) // len(item))


def _keys(size: int) -> bytes:
    return b"{" + b",".join(b'"%07d":1' % at for at in range((size - 200) // 12)) + b"}"


def _body(field: str, value: bytes) -> tuple[str, bytes]:
    """Return the path and body of a request in which `field` has this value."""
    if field.startswith("responses."):
        name = field.partition(".")[2].encode()
        return RESPONSES, (b"{" if name == b"input" else b'{"input":"hi",') + b'"' + name + b'":' + value + b"}"
    if field == "messages":
        return CHAT, b'{"messages":' + value + b"}"
    if field == "content":
        return CHAT, b'{"messages":[{"role":"user","content":' + value + b"}]}"
    if field == "key":
        return CHAT, b"{" + MESSAGES + b"," + value + b":1}"
    if field in ("prompt", "logit_bias", "stop_token_ids"):
        return COMPLETION, b'{"prompt":"hi","' + field.encode() + b'":' + value + b"}"
    return CHAT, b"{" + MESSAGES + b',"' + field.encode() + b'":' + value + b"}"


class Ticker:
    """A task that measures its event loop. `longest` is the longest time in seconds that it waited for its turn.

    The time is not counted for which the loop's thread waited for a CPU, because other processes had them.
    """

    PAUSE = 0.002

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        """Tick until cancelled."""
        last = _now()
        while True:
            await asyncio.sleep(self.PAUSE)
            now = _now()
            self.longest, last = max(self.longest, now - last - self.PAUSE), now


def _now() -> float:
    """Return a time in seconds that stands still while this thread waits for a CPU, if the kernel counts that."""
    waited = 0
    with suppress(OSError):
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])  # nanoseconds
    return time.perf_counter() - waited / 1e9


@contextmanager
def ticking() -> Iterator[Ticker]:
    """Run a ticker on the running loop for the time of the block."""
    ticker = Ticker()
    task = asyncio.get_running_loop().create_task(ticker.run())
    try:
        yield ticker
    finally:
        task.cancel()


JSON = {"Content-Type": "application/json"}


def post(port: int, path: str, body: bytes, headers: Mapping[str, str] = JSON) -> tuple[int, int]:
    """Send a body from this thread. Return the status and the length of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, len(response.read())
    finally:
        connection.close()


async def stall(
    port: int, path: str, sent: Sequence[bytes], headers: Mapping[str, str] = JSON
) -> tuple[float, list[int], int]:
    """Return the loop's longest stall while these bodies are sent at once, their statuses, and the longest answer."""
    with ticking() as ticker:
        answers = await asyncio.gather(*(asyncio.to_thread(post, port, path, body, headers) for body in sent))
        await asyncio.sleep(0.01)  # freeing objects after the response counts too
    return ticker.longest, [status for status, _ in answers], max(length for _, length in answers)

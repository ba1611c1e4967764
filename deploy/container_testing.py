"""What tests of containers share: streams that must not break, commands, and waiting."""

import asyncio
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from openai import AsyncOpenAI

MODEL = "SmolLM2-135M-Instruct"
TOKENS = 128
PROMPTS = ("What is a lighthouse?", "Tell me of the sea.", "Count to fifty.", "Why do ships float?")
BUILDING, STARTING, STREAMING = 1800.0, 240.0, 400.0  # timeouts in seconds, reached only by failures


class Failure(Exception):
    """The test failed."""


class Streams:
    """Chat completions that are streamed through the balancer at the same time, one for each of `prompts`.

    With `repeat`, each is followed by another one until the disturbance is over.
    """

    def __init__(self, port: int, prompts: Sequence[str], *, repeat: bool = False) -> None:
        # no retries: a stream that breaks is what this test looks for
        self._client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        self._prompts = prompts
        self._waiting = len(prompts)  # number of streams without any text yet
        self._begun = asyncio.Event()
        self._repeat = repeat

    async def run(self, disturb: Callable[[], None] | None = None) -> list[tuple[str, str]]:
        """Return prompts and texts. Call `disturb` once every stream has begun. Raise `Failure` if one fails."""
        async with asyncio.timeout(STREAMING), self._client:
            streams = [asyncio.create_task(self._streams(prompt)) for prompt in self._prompts]
            begun = asyncio.create_task(self._begun.wait())
            try:
                await asyncio.wait([begun, *streams], return_when=asyncio.FIRST_COMPLETED)
                if disturb is not None and begun.done():
                    await asyncio.to_thread(disturb)
                self._repeat = False
                results = await asyncio.gather(*streams, return_exceptions=True)
            finally:  # a failure elsewhere leaves them running
                for task in (begun, *streams):
                    task.cancel()
                await asyncio.gather(begun, *streams, return_exceptions=True)
        if failures := [each for each in results if isinstance(each, BaseException)]:
            raise Failure(f"{len(failures)} of {len(results)} clients' streams failed, the first with {failures[0]!r}")
        expect(self._begun.is_set(), "a stream had ended before all had begun")
        return [each for result in results if isinstance(result, list) for each in result]

    def _begin(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._begun.set()

    async def _streams(self, prompt: str) -> list[tuple[str, str]]:
        done = [(prompt, await self._stream(prompt))]
        while self._repeat:
            done.append((prompt, await self._stream(prompt)))
        return done

    async def _stream(self, prompt: str) -> str:
        text, tokens, reason = "", 0, None
        stream = await self._client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if not text and choice.delta.content:
                    self._begin()
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        expect((tokens, reason) == (TOKENS, "length"), f"a stream ended with {tokens} tokens, for {reason}")
        return text


def check(streamed: Sequence[tuple[str, str]], expected: Mapping[str, str]) -> None:
    """Raise `Failure` unless every text is that of an undisturbed run."""
    changed = sum(text != expected[prompt] for prompt, text in streamed)
    expect(not changed, f"{changed} of {len(streamed)} streams have other text than undisturbed ones")


def works(*argv: str) -> bool:
    """Return whether a command exists and succeeds."""
    try:
        return subprocess.run(argv, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def execute(argv: Sequence[str], seconds: float, environment: dict[str, str]) -> str:
    """Run a command and return its output. Raise `Failure` with the ends of its output and its errors."""
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failure(f"{' '.join(argv)}: not done in {seconds:.0f} s") from None
        raise
    if process.returncode:
        raise Failure(f"{' '.join(argv)}: status {process.returncode}\n{output[-2000:]}{errors[-2000:]}")
    return output


def build(images: Callable[[float], object]) -> None:
    """Build images by `images(seconds)`, up to three times within BUILDING. Raise `Failure` if the last time fails.

    A build downloads hundreds of MB of packages and ends when a host is out of reach for a while. What was built
    before that is in the engine's cache.
    """
    deadline = time.monotonic() + BUILDING
    for pause in (20.0, 60.0, BUILDING):
        try:
            images(deadline - time.monotonic())
            return
        except Failure as failure:
            if time.monotonic() + pause >= deadline:
                raise
            print(f"the images could not be built, and are built again after {pause:.0f} s: {failure}")
            time.sleep(pause)


@contextmanager
def step(description: str) -> Iterator[None]:
    """Print a line when the block succeeds, with the seconds it took."""
    began = time.monotonic()
    yield
    print(f"{time.monotonic() - began:7.1f} s  {description}", flush=True)


def until(holds: Callable[[], bool], otherwise: str, seconds: float = STARTING) -> None:
    """Wait until `holds()`. Raise `Failure` if that takes too long."""
    deadline = time.monotonic() + seconds
    while not holds():
        expect(time.monotonic() < deadline, f"{otherwise} after {seconds:.0f} s")
        time.sleep(0.3)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failure(otherwise)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

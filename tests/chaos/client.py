"""Clients of the deployment's gateways, and all that they get: tokens, log-probabilities, text, ends and usage.

They are the official library, over Unix sockets, so that a gateway is reached whatever happens to the network.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import openai
from msgspec import Struct
from openai import AsyncOpenAI

MODEL = "tiny"
TIMEOUT = 150.0  # seconds, reached only by cells that fail

Api = AsyncOpenAI


class Request(NamedTuple):
    """A request of the API: the fields of a completion, or of a chat if there are `messages`."""

    fields: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def is_chat(self) -> bool:
        return "messages" in self.fields


class Choice(Struct):
    """What came of one sample."""

    text: str = ""
    logprobs: list[Any] = []  # of each token: it, its log-probability and the likeliest others
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Outcome(Struct):
    """What came of a request."""

    choices: dict[int, Choice] = {}
    usage: dict[str, Any] = {}

    @property
    def num_tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    def take(self, request: Request, answer: dict[str, Any]) -> None:
        """Add an answer, or a chunk of one."""
        for part in answer["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            assert choice.finish_reason is None, "something came after the end of a choice"
            content = part.get("delta") or part.get("message") or {}
            choice.text += (content.get("content") if request.is_chat else part["text"]) or ""
            choice.logprobs += _entries(part.get("logprobs") or {})
            choice.prompt_logprobs = part.get("prompt_logprobs")
            choice.finish_reason, choice.stop_reason = part["finish_reason"], part.get("stop_reason")
        if answer.get("usage"):
            # Whether a prompt begins like an earlier one that is still cached depends on the time.
            self.usage = {name: count for name, count in answer["usage"].items() if name.endswith("_tokens")}


def _entries(logprobs: dict[str, Any]) -> list[Any]:
    if logprobs.get("content"):
        return list(logprobs["content"])
    columns = [logprobs.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    return [list(entry) for entry in zip(*columns, strict=True)]


@asynccontextmanager
async def api_at(socket: Path) -> AsyncIterator[Api]:
    """Yield a client of the gateway that listens on a Unix socket. It never tries twice."""
    transport = httpx2.AsyncHTTPTransport(uds=str(socket))
    http = openai.DefaultAsyncHttpxClient(transport=transport)
    async with AsyncOpenAI(
        base_url="http://gateway/v1", api_key="any", max_retries=0, timeout=TIMEOUT, http_client=http
    ) as api:
        yield api


async def ask(api: Api, request: Request, accepted: asyncio.Event | None = None) -> Outcome:
    """Return what came of a request. Set `accepted` when a stream begins, which is when its engine has the request."""
    outcome = Outcome()
    create: Any = api.chat.completions.create if request.is_chat else api.completions.create
    answer = await create(model=MODEL, **_arguments(request))
    if accepted is not None:
        accepted.set()
    if not request.is_stream:
        outcome.take(request, answer.model_dump())
        return outcome
    async for chunk in answer:
        outcome.take(request, chunk.model_dump())
    assert outcome.choices, "the stream has ended without a chunk"
    assert all(choice.finish_reason for choice in outcome.choices.values()), "the stream has ended too early"
    return outcome


class Client:
    """Asks the gateways in turn, if it may, as a client behind a balancer does that sees one fail or drain."""

    def __init__(self, apis: Sequence[Api], request: Request, may_retry: Callable[[Exception], bool]) -> None:
        self.request = request
        self.accepted = asyncio.Event()  # of a stream
        self.retries = 0
        self._apis, self._may_retry = apis, may_retry

    async def ask(self) -> Outcome:
        """Return what came of the request."""
        while True:
            try:
                return await ask(self._apis[self.retries], self.request, self.accepted)
            except Exception as error:
                if self.retries + 1 == len(self._apis) or not self._may_retry(error):
                    raise
                self.retries += 1


def gateway_is_lost(error: Exception) -> bool:
    """Return whether a client sees this error because its gateway was killed."""
    return isinstance(error, openai.APIConnectionError | httpx2.TransportError)


def gateway_refuses(error: Exception) -> bool:
    """Return whether a client sees this error because its gateway drains and does not take the request."""
    return isinstance(error, openai.APIStatusError) and error.status_code == 503


def _arguments(request: Request) -> dict[str, Any]:
    """Return the arguments of the library's method. Fields that OpenAI does not have are its `extra_body`."""
    fields = dict(request.fields)
    if request.is_stream:
        fields["stream_options"] = {"include_usage": True}
    extra = {name: fields.pop(name) for name in VLLM_FIELDS if name in fields}
    return fields | {"extra_body": extra}


VLLM_FIELDS = (
    "top_k", "ignore_eos", "min_tokens", "repetition_penalty", "stop_token_ids", "include_stop_str_in_output",
    "prompt_logprobs",
)  # fmt: skip


def differences(expected: Outcome, outcome: Outcome) -> list[str]:
    """Return how an outcome differs from that of the undisturbed run: a line for each thing that is not the same."""
    found = []
    if expected.usage != outcome.usage:
        found.append(f"usage {outcome.usage} instead of {expected.usage}")
    if sorted(expected.choices) != sorted(outcome.choices):
        return [*found, f"choices {sorted(outcome.choices)} instead of {sorted(expected.choices)}"]
    for index, choice in outcome.choices.items():
        undisturbed = expected.choices[index]
        for name in Choice.__struct_fields__:
            before, now = getattr(undisturbed, name), getattr(choice, name)
            if before != now:
                found.append(f"{name} of choice {index}: {_describe(before, now)}")
    return found


def _describe(before: Any, now: Any) -> str:
    if not isinstance(before, list) or not isinstance(now, list):
        return f"{now!r} instead of {before!r}"
    unlike = [at for at, (one, other) in enumerate(zip(before, now, strict=False)) if one != other]
    first = unlike[0] if unlike else min(len(before), len(now))
    return f"{len(now)} entries instead of {len(before)}, different from {first} on"

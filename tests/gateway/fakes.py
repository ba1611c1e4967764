"""A fake backend with the interface of the real one, a gateway on top of it, and a client of that gateway.

The backend's engine generates for each sample the tokens of a script, one a step, and obeys the wire's rules about stop
tokens, max_tokens, min_tokens and log-probabilities. The end-of-sequence token follows the script's last one.
"""

import asyncio
import io
import itertools
import json
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.typedefs import Middleware
from aiohttp.web import Application, Request

from services.gateway.api_responses import ErrorResponse
from services.gateway.app import make_app
from services.gateway.config import GatewayConfig
from services.gateway.engine_request import Interruption
from services.gateway.gateway import Gateway
from services.gateway.lifecycle import Lifecycle
from services.gateway.metrics import Metrics
from services.gateway.served_model import ServedModel, choose_parsers, plain_names
from shared.errors import Unavailable
from shared.protocol import (
    VERSION,
    AdapterInfo,
    FinishReason,
    ModelInfo,
    ProgressRow,
    Sampling,
    SchedulingInfo,
    Snapshot,
    Status,
    TokenLogprobs,
    Welcome,
)
from shared.text.grammars import GrammarCompiler
from shared.text.sampling_defaults import SamplingDefaults
from shared.text.template import ChatTemplate
from tests.gateway.documented import check, check_answer, check_event
from tests.text.vocabulary import CHATML, make_tokenizer

TOKENIZER = make_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER)
VOCAB = TOKENIZER.vocab_size + 10  # padded, as the vocabularies of models are
EOS = TOKENIZER.eos_token_ids[0]
END_TURN = cast(int, TOKENIZER.token_id("<|im_end|>"))
MODEL = "tiny"

Script = Callable[[Sequence[int], int], Iterable[int]]  # (prompt, sample) -> output


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def says(*texts: str | Sequence[int]) -> Script:
    """Return a script by which sample i of any prompt generates the i-th text."""
    outputs = [ids(text) if isinstance(text, str) else list(text) for text in texts]
    return lambda _, sample: outputs[sample % len(outputs)]


DEFAULT = says("one two three")


def endless(_: Sequence[int], __: int) -> Iterable[int]:
    return itertools.cycle(ids(" two"))


class FakeEngineRequest:
    """A request at the fake engine. `left` is set when its block is left; `aborted` are single samples."""

    engine = "0"
    samples_before = 0
    request_id = ""
    cache_salt = ""
    adapter = ""

    def __init__(self, backend: "FakeBackend", tokens: "array[int]", sampling: Sampling, n: int, priority: int) -> None:
        self.tokens, self.sampling, self.n, self.priority = list(tokens), sampling, n, priority
        self.aborted: list[int] = []
        self.left = asyncio.Event()
        self.interruptions: list[Interruption] = []
        self.recoveries: list[Interruption] = []
        self._backend = backend
        self._outputs = [self._output(sample) for sample in range(n)]
        self._positions = [0] * n
        self._live = list(range(n))
        self.steps = 0  # whose rows were read

    async def wait_accepted(self) -> None:
        """Wait until the backend's `answers` is set. Raise its refusal if it has one."""
        await self._backend.answers.wait()
        if self._backend.refusal is not None:
            raise self._backend.refusal

    async def rows(self) -> list[ProgressRow]:
        if self.steps == 0:
            await self.wait_accepted()
        rows: list[ProgressRow] = []
        for _ in range(self._backend.burst):
            if self.steps == self._backend.pause_at:
                await self._backend.go_on.wait()
            if self.steps == self._backend.fail_at and self._backend.failure is not None:
                raise self._backend.failure
            rows += [self._row(sample) for sample in list(self._live)]
            self.steps += 1
        await asyncio.sleep(0)
        return rows

    async def follow(self, take: Callable[[list[ProgressRow]], bool]) -> None:
        while take(await self.rows()):
            pass

    def abort(self, sample: int) -> None:
        self.aborted.append(sample)
        if sample in self._live:
            self._live.remove(sample)

    def _output(self, sample: int) -> Iterable[int]:
        return itertools.chain(self._backend.script(self.tokens, sample), itertools.repeat(EOS))

    def _row(self, sample: int) -> ProgressRow:
        sampling, position = self.sampling, self._positions[sample]
        scores = None
        if sampling.prompt_logprobs >= 0 and position == 0:
            scores = [logprobs_of(token, sampling.prompt_logprobs) for token in self.tokens[1:]]
        cached = self._backend.cached_tokens
        if sampling.max_tokens == 0:
            self._live.remove(sample)
            return ProgressRow(1, sample, 0, [], None, scores, FinishReason.LENGTH, cached, "", self._backend.admission)
        self._outputs[sample] = iter(self._outputs[sample])
        token = next(cast(Any, self._outputs[sample]))
        self._positions[sample] += 1
        finish = self._finish(token, self._positions[sample])
        if finish is not None:
            self._live.remove(sample)
        logprobs = None
        if sampling.logprobs >= 0:
            logprobs = [logprobs_of(token, sampling.logprobs, sampling.logprob_token_ids)]
        admission = None if position else self._backend.admission
        return ProgressRow(1, sample, position, [token], logprobs, scores, finish, cached, "", admission)

    def _finish(self, token: int, count: int) -> FinishReason | None:
        if token in self.sampling.stop_token_ids and count > self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count == self.sampling.max_tokens else None


def logprobs_of(token: int, count: int, named: Sequence[int] = ()) -> TokenLogprobs:
    """Return log-probabilities that tell tokens apart: -token/1000; the next ids as alternatives, the last at -inf, or
    those that are `named`.
    """
    if named:
        return TokenLogprobs(-token / 1000, 1, list(named), [-id / 1000 for id in named])
    top = [(token + at) % VOCAB for at in range(count)]
    values = [-token / 1000 - at for at in range(count)]
    if count > 1:
        values[-1] = float("-inf")
    return TokenLogprobs(-token / 1000, 1, top, values)


class FakeBackend:
    """A backend whose attributes a test sets."""

    def __init__(self, script: Script = DEFAULT, *, max_model_len: int = 256) -> None:
        model = ModelInfo(MODEL, "TinyForCausalLM", "float32", max_model_len, VOCAB, "f")
        self.welcome: Welcome | None = Welcome(VERSION, "0", "boot", model, max_model_len, 8)
        self.script = script
        self.requests: list[FakeEngineRequest] = []
        self.is_ready = True
        self.unusable = ""
        self.cached_tokens = 0
        self.burst = 1  # steps whose rows come together
        self.admission: SchedulingInfo | None = None  # of every sample
        self.refusal: Exception | None = None  # what the engine answers instead of accepting
        self.answers = asyncio.Event()  # set: the engine answers
        self.answers.set()
        self.failure: Exception | None = None  # raised at step `fail_at`
        self.fail_at = -1
        self.pause_at = -1  # step that waits for `go_on`
        self.go_on = asyncio.Event()
        self.submitted = asyncio.Event()
        self.num_resets = 0  # of the prefix cache
        self.adapters: dict[str, AdapterInfo] = {}
        self.adapter_error: Exception | None = None  # of a change of adapters

    async def reset_prefix_cache(self) -> None:
        if not self.is_ready:
            raise Unavailable("the engine at ipc://engine is not connected")
        self.num_resets += 1

    async def add_adapter(self, name: str, path: str, *, replaces: bool) -> None:
        if self.adapter_error is not None:
            raise self.adapter_error
        self.adapters[name] = AdapterInfo(name, path, "replaced" if replaces else "new")

    async def remove_adapter(self, name: str) -> None:
        del self.adapters[name]

    async def first_welcome(self) -> Welcome:
        if self.welcome is None:
            raise Unavailable("no engine was ready for 60 s")
        return self.welcome

    def ready(self, count: int = 1) -> bool:
        return count <= int(self.is_ready)

    def statuses(self) -> Mapping[str, Status]:
        return {"0": Status(True, False, Snapshot(running=3, blocks=10, blocks_free=5, prompt_tokens=7))}

    @asynccontextmanager
    async def submit(
        self,
        tokens: "array[int]",
        sampling: Sampling,
        *,
        n: int,
        priority: int,
        samples_before: int = 0,
        request_id: str = "",
        cache_salt: str = "",
        adapter: str = "",
    ) -> AsyncIterator[FakeEngineRequest]:
        assert isinstance(tokens, array)
        assert tokens.typecode == "i"
        request = FakeEngineRequest(self, tokens, sampling, n, priority)
        request.samples_before, request.request_id, request.cache_salt = samples_before, request_id, cache_salt
        request.adapter = adapter
        self.requests.append(request)
        self.submitted.set()
        try:
            yield request
        finally:
            request.left.set()


class Client(TestClient[Request, Application]):
    """A client of a gateway in this process."""

    gateway: Gateway

    async def complete(self, **fields: Any) -> Any:
        return await self._ask("/v1/completions", fields)

    async def chat(self, **fields: Any) -> Any:
        return await self._ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | fields)

    async def stream_completion(self, **fields: Any) -> list[dict[str, Any]]:
        return await self._stream("/v1/completions", fields)

    async def stream_chat(self, **fields: Any) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": "hi"}]
        return await self._stream("/v1/chat/completions", {"messages": messages} | fields)

    async def respond(self, **fields: Any) -> Any:
        return await self._ask("/v1/responses", {"input": "hi"} | fields)

    async def stream_response(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the data of the events of a response, whose lines name their types."""
        path = "/v1/responses"
        async with self.post(path, json={"input": "hi", "stream": True} | fields) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            parts = [part for part in (await response.text()).split("\n\n") if part and not part.startswith(":")]
        data = [json.loads(part.partition("\ndata: ")[2]) for part in parts]
        assert [part.partition("\n")[0] for part in parts] == [f"event: {one['type']}" for one in data]
        for one in data:
            check_event(path, one)
        return data

    async def refused(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Send a body that the gateway refuses. Return the status and the error."""
        data = body if isinstance(body, (bytes, io.BytesIO)) else json.dumps(body).encode()
        async with self.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
            return response.status, await error_of(response)

    async def _ask(self, path: str, fields: dict[str, Any]) -> Any:
        async with self.post(path, json=fields) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
            check_answer(path, answer)
            return answer

    async def _stream(self, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        async with self.post(path, json=fields | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            data = events(await response.text())
            for one in data:
                check_event(path, one)
            return data


async def error_of(response: ClientResponse) -> dict[str, Any]:
    """Return the error in a response, after a check of its shape."""
    body = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == response.status
    check(body, ErrorResponse)
    assert body["error"]["message"]
    return cast(dict[str, Any], body["error"])


def events(text: str) -> list[dict[str, Any]]:
    """Return the objects of a stream, which must end in [DONE]."""
    parts = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert parts.pop() == "data: [DONE]"
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def texts(chunks: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Return the joined text of each choice of a stream, of either endpoint."""
    joined: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined


def ends(chunks: Iterable[dict[str, Any]]) -> dict[int, list[str]]:
    """Return the finish reasons of each choice of a stream."""
    reasons: dict[int, list[str]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        if choice["finish_reason"] is not None:
            reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    return reasons


def make_gateway(
    backend: FakeBackend,
    *,
    template: str | None = CHATML,
    defaults: SamplingDefaults | None = None,
    **settings: Any,
) -> Gateway:
    tokenizer = settings.pop("tokenizer", TOKENIZER)
    config = GatewayConfig(**settings)
    chat_template = ChatTemplate(template, tokenizer.special, plain_names=plain_names(config, tokenizer))
    model = ServedModel(
        names=tuple(config.served_model_name) or (MODEL,),
        root=MODEL,
        tokenizer=tokenizer,
        template=chat_template,
        defaults=defaults or SamplingDefaults(),
        grammars=GRAMMARS if tokenizer is TOKENIZER else GrammarCompiler(tokenizer),
        parsers=choose_parsers(config, chat_template, tokenizer),
    )
    metrics = Metrics(model.name, lambda: {name: status.snapshot for name, status in backend.statuses().items()})
    return Gateway(config, model, cast(Any, backend), metrics, Lifecycle(config.shutdown_delay, config.drain_timeout))


@asynccontextmanager
async def serve(
    backend: FakeBackend | None = None, outer: Sequence[Middleware] = (), **settings: Any
) -> AsyncIterator[Client]:
    """Yield a client of a gateway with these settings (those of `make_gateway`) and outermost middlewares."""
    gateway = make_gateway(backend or FakeBackend(), **settings)
    async with Client(TestServer(make_app(gateway, outer))) as client:
        client.gateway = gateway
        yield client


def write_template(folder: Path, source: str) -> str:
    path = folder / "template.jinja"
    path.write_text(source)
    return str(path)

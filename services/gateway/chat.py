"""POST /v1/chat/completions"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from services.gateway.body import Head, read
from services.gateway.generation import Generation, Update
from services.gateway.logprobs import chat_logprobs, has_many_scores, prompt_logprobs
from services.gateway.offload import off_loop_if
from services.gateway.openai import ChatRequest
from services.gateway.prompt import chat_prompt
from services.gateway.sampling import chat_params, priority_of
from services.gateway.serving import GATEWAY, REQUEST_ID, Gateway, Job
from services.gateway.stream import collect, stream
from services.gateway.usage import usage
from shared.text.sample_text import SampleText

_text = msgspec.json.Encoder().encode


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answers with the model's next message, whole or as a stream."""
    gateway, arrived = http.app[GATEWAY], time.monotonic()
    request = await read(http, ChatRequest)
    job = await _job(gateway, request, arrived)
    id = f"chatcmpl-{http[REQUEST_ID]}"
    if request.stream:
        head = Head.now(id, "chat.completion.chunk", gateway.model.name)
        return await stream(http, gateway, [job], _Chunks(head, bool(request.logprobs)), request.stream_options)
    head = Head.now(id, "chat.completion", gateway.model.name)
    generations = await collect(gateway, [job])
    return await off_loop_if(has_many_scores(generations), _answer, head, request, generations)


async def _job(gateway: Gateway, request: ChatRequest, arrived: float) -> Job:
    model = gateway.model
    model.check(request.model)
    params = chat_params(request, model.defaults)
    return gateway.job(
        await chat_prompt(request, model.tokenizer, model.template, max_model_len=gateway.welcome.max_model_len),
        params,
        default_max_tokens=model.defaults.max_tokens,
        priority=priority_of(request),
        arrived=arrived,
    )


def _answer(head: Head, request: ChatRequest, generations: Sequence[Generation]) -> web.Response:
    (generation,) = generations
    choices = [
        _choice(at, sample, chat_logprobs(generation.entries[at]) if request.logprobs else None)
        for at, sample in enumerate(generation.samples)
    ]
    wanted = generation.job.params.prompt_logprobs
    scores = None if wanted is None else prompt_logprobs(generation.prompt_entries(), wanted)
    return head.answer(choices, usage=usage(generations), prompt_logprobs=scores)


def _choice(index: int, sample: SampleText, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": sample.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }


class _Chunks:
    """Chunks of a chat: the role first, then pieces of content, the last with the reason of the end."""

    def __init__(self, head: Head, logprobs: bool) -> None:
        self.head = head.opening
        self._logprobs = logprobs

    def opening(self, index: int, generation: Generation) -> bytes:
        return _OPENING % index

    async def prepare(self, position: int, generation: Generation) -> None:
        """Do nothing: a chat echoes nothing."""

    def choice(self, index: int, generation: Generation, update: Update) -> bytes:
        sample = generation.samples[update.sample]
        delta = b'{"content":' + _text(update.text) + b"}"  # "" too: clients join contents without a look
        logprobs = _text(chat_logprobs(update.entries)) if self._logprobs else b"null"
        if sample.finish_reason is None:
            return _MIDDLE % (index, delta, logprobs)
        return _LAST % (index, delta, logprobs, _text(sample.finish_reason), _text(sample.stop_reason))


_OPENING = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
_MIDDLE = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}'
_LAST = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}'

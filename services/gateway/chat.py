"""POST /v1/chat/completions"""

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from services.gateway.api_requests import ChatRequest
from services.gateway.body import read
from services.gateway.gateway import GATEWAY, REQUEST_ID, RESPONSE_ID, Gateway
from services.gateway.generation import Generation, Update
from services.gateway.logprobs import chat_logprobs, has_many_logprobs, prompt_logprobs
from services.gateway.prompt import PreparedPrompt, chat_prompt
from services.gateway.response import ResponseHead, to_json, usage
from services.gateway.sampling import chat_params, priority_of
from services.gateway.stream import collect, stream
from services.gateway.structured_outputs import compile_grammar
from services.gateway.threads import run_in_thread_if
from shared.text.sample_text import SampleText


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answer with the model's next message, whole or as a stream."""
    gateway, arrived = http.app[GATEWAY], time.monotonic()
    id = http[RESPONSE_ID] = f"chatcmpl-{http[REQUEST_ID]}"
    request = await read(http, ChatRequest)
    prompt = await _prepare(gateway, request, arrived, id)
    if request.stream:
        head = ResponseHead.now(id, "chat.completion.chunk", gateway.model.name)
        encoder = _ChunkEncoder(head, bool(request.logprobs))
        return await stream(http, gateway, [prompt], encoder, request.stream_options)
    head = ResponseHead.now(id, "chat.completion", gateway.model.name)
    generations = await collect(gateway, [prompt])
    return await run_in_thread_if(has_many_logprobs(generations), _respond, head, request, generations)


async def _prepare(gateway: Gateway, request: ChatRequest, arrived: float, id: str) -> PreparedPrompt:
    model = gateway.model
    model.check(request.model)
    params = chat_params(request, model.defaults)
    grammar = await compile_grammar(request, model)
    welcome = await gateway.backend.first_welcome()
    return gateway.prepare(
        await chat_prompt(request, model.tokenizer, model.template, max_model_len=welcome.max_model_len),
        welcome,
        params,
        default_max_tokens=model.defaults.max_tokens,
        priority=priority_of(request),
        arrived=arrived,
        request_id=id,
        grammar=grammar,
    )


def _respond(head: ResponseHead, request: ChatRequest, generations: Sequence[Generation]) -> web.Response:
    (generation,) = generations
    choices = [
        _choice(index, sample, chat_logprobs(generation.logprobs[index]) if request.logprobs else None)
        for index, sample in enumerate(generation.text.samples)
    ]
    count = generation.prompt.params.prompt_logprobs
    of_prompt = None if count is None else prompt_logprobs(generation.text.prompt_logprobs(), count)
    return head.respond(choices, usage=usage(generations), prompt_logprobs=of_prompt)


def _choice(index: int, sample: SampleText, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": sample.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }


class _ChunkEncoder:
    """Encodes the chunks of a chat: first the role, then pieces of content, the last one with the finish reason."""

    def __init__(self, head: ResponseHead, logprobs: bool) -> None:
        self.prefix = head.chunk_prefix  # a chunk's JSON up to its choices
        self._logprobs = logprobs

    def opening(self, index: int, generation: Generation) -> bytes:
        return _OPENING % index

    async def prepare(self, prompt_index: int, generation: Generation) -> None:
        """Do nothing: only an echo is made before the first chunk, and a chat has none."""

    def choice(self, index: int, generation: Generation, update: Update) -> bytes:
        sample = generation.text.samples[update.sample]
        delta = (
            b'{"content":' + to_json(update.text) + b"}"
        )  # even if it is "", since clients join contents without a check
        logprobs = to_json(chat_logprobs(update.logprobs)) if self._logprobs else b"null"
        if sample.finish_reason is None:
            return _MIDDLE % (index, delta, logprobs)
        return _LAST % (index, delta, logprobs, to_json(sample.finish_reason), to_json(sample.stop_reason))


_OPENING = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
_MIDDLE = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}'
_LAST = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}'

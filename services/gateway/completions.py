"""POST /v1/completions"""

import time
from typing import Any

import msgspec
from aiohttp import web

from services.gateway.body import Head, read
from services.gateway.generation import Generation, Update
from services.gateway.logprobs import completion_logprobs, prompt_logprobs
from services.gateway.openai import CompletionRequest
from services.gateway.prompt import completion_prompts
from services.gateway.sampling import COMPLETION_TOKENS, completion_params, priority_of
from services.gateway.serving import GATEWAY, REQUEST_ID, Gateway, Job
from services.gateway.stream import collect, stream
from services.gateway.usage import usage
from shared.errors import InvalidRequest

MAX_CHOICES = 4096
"""Prompts times n. Each choice costs the gateway some kilobytes, and the answer is in one piece."""

_text = msgspec.json.Encoder().encode


async def completions(http: web.Request) -> web.StreamResponse:
    """Answers with what follows each prompt, whole or as a stream. Choice i is sample i % n of prompt i // n."""
    gateway, arrived = http.app[GATEWAY], time.monotonic()
    request = await read(http, CompletionRequest)
    jobs = await _jobs(gateway, request, arrived)
    head = Head.now(f"cmpl-{http[REQUEST_ID]}", "text_completion", gateway.model.name)
    if request.stream:
        return await stream(http, gateway, jobs, _Chunks(head), request.stream_options)
    generations = await collect(gateway, jobs)
    scores = request.prompt_logprobs is not None
    choices = [choice for at, generation in enumerate(generations) for choice in _choices(at, generation, scores)]
    return head.answer(choices, usage=usage(generations))


async def _jobs(gateway: Gateway, request: CompletionRequest, arrived: float) -> list[Job]:
    model = gateway.model
    model.check(request.model)
    params = completion_params(request, model.defaults)
    welcome = gateway.welcome
    prompts = await completion_prompts(
        request, model.tokenizer, max_model_len=welcome.max_model_len, vocab_size=welcome.facts.vocab_size
    )
    if len(prompts) * params.n > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_CHOICES}", "prompt")
    default = COMPLETION_TOKENS if model.defaults.max_tokens is None else model.defaults.max_tokens
    priority = priority_of(request)
    return [
        gateway.job(
            prompt, params, default_max_tokens=default, priority=priority, arrived=arrived, echo=request.echo is True
        )
        for prompt in prompts
    ]


def _choices(position: int, generation: Generation, with_scores: bool) -> list[dict[str, Any]]:
    """The choices of the prompt at `position`."""
    job = generation.job
    scores = None
    if with_scores and job.params.prompt_logprobs is not None:
        scores = prompt_logprobs(generation.prompt_entries(), job.params.prompt_logprobs)
    return [
        {
            "index": position * job.params.n + at,
            "text": (job.echo or "") + sample.text,
            "logprobs": _logprobs(generation, Update(at, sample.text, generation.entries[at]), job.echo is not None),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "prompt_logprobs": scores,
        }
        for at, sample in enumerate(generation.samples)
    ]


def _logprobs(generation: Generation, update: Update, with_prompt: bool) -> dict[str, Any] | None:
    count = generation.job.params.logprobs
    if count is None:
        return None
    prompt = generation.prompt_entries() if with_prompt else []
    return completion_logprobs(prompt + update.entries, count)


class _Chunks:
    """Chunks of completions. An echo is the first text of each choice; with log-probabilities it waits for them."""

    def __init__(self, head: Head) -> None:
        self.head = head.opening
        self._echoed: set[int] = set()

    def opening(self, index: int, generation: Generation) -> bytes:
        job = generation.job
        if not job.echo or job.params.logprobs is not None:
            return b""
        return _MIDDLE % (index, _text(job.echo), b"null")

    def choice(self, index: int, generation: Generation, update: Update) -> bytes:
        sample, job = generation.samples[update.sample], generation.job
        echo = job.echo is not None and job.params.logprobs is not None and index not in self._echoed
        self._echoed.add(index)
        text = _text((job.echo or "") + update.text if echo else update.text)
        logprobs = _text(_logprobs(generation, update, with_prompt=echo))
        if sample.finish_reason is None:
            return _MIDDLE % (index, text, logprobs)
        return _LAST % (index, text, logprobs, _text(sample.finish_reason), _text(sample.stop_reason))


_MIDDLE = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null,"stop_reason":null}'
_LAST = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}'

"""POST /v1/completions"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from services.gateway.body import Head, read
from services.gateway.bounds import MAX_LISTED, MAX_SAMPLES
from services.gateway.generation import Generation, Update
from services.gateway.logprobs import completion_logprobs, has_many_scores, prompt_logprobs
from services.gateway.offload import off_loop_if
from services.gateway.openai import CompletionRequest
from services.gateway.prompt import Prompt, completion_prompts
from services.gateway.sampling import COMPLETION_TOKENS, completion_params, priority_of
from services.gateway.serving import GATEWAY, REQUEST_ID, Gateway, Job
from services.gateway.stream import collect, stream
from services.gateway.usage import usage
from shared.errors import InvalidRequest
from shared.params import SamplingParams
from shared.text.logprobs import LogprobEntry

MAX_SCORES = 1_000_000
"""Log-probabilities of prompt tokens in one answer, alternatives included. They make some 30 MB of JSON."""

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
    return await off_loop_if(has_many_scores(generations), _answer, head, request, generations)


def _answer(head: Head, request: CompletionRequest, generations: Sequence[Generation]) -> web.Response:
    choices: list[dict[str, Any]] = []
    for at, generation in enumerate(generations):
        choices += _choices(at, generation, request.prompt_logprobs is not None)
    return head.answer(choices, usage=usage(generations))


async def _jobs(gateway: Gateway, request: CompletionRequest, arrived: float) -> list[Job]:
    model = gateway.model
    model.check(request.model)
    params = completion_params(request, model.defaults)
    welcome = gateway.welcome
    prompts = await completion_prompts(
        request, model.tokenizer, max_model_len=welcome.max_model_len, vocab_size=welcome.model.vocab_size
    )
    _check_samples(len(prompts), params)
    default = COMPLETION_TOKENS if model.defaults.max_tokens is None else model.defaults.max_tokens
    priority = priority_of(request)
    _check_scores(prompts, params)
    jobs: list[Job] = []
    for at, prompt in enumerate(prompts):
        job = gateway.job(
            prompt,
            params,
            default_max_tokens=default,
            priority=priority,
            arrived=arrived,
            samples_before=at * params.n,
            echo=request.echo is True,
        )
        jobs.append(job)
        await asyncio.sleep(0)  # the other requests' turn
    return jobs


def _choices(position: int, generation: Generation, with_scores: bool) -> list[dict[str, Any]]:
    """The choices of the prompt at `position`."""
    job = generation.job
    echoed = _echoed(generation)
    scores = None
    if with_scores and job.params.prompt_logprobs is not None:
        scores = prompt_logprobs(generation.prompt_entries(), job.params.prompt_logprobs)
    return [
        {
            "index": position * job.params.n + at,
            "text": (job.echo or "") + sample.text,
            "logprobs": _logprobs(generation, generation.entries[at], echoed),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "prompt_logprobs": scores,
        }
        for at, sample in enumerate(generation.samples)
    ]


def _check_samples(prompts: int, params: SamplingParams) -> None:
    if prompts * params.n > MAX_SAMPLES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_SAMPLES}, got {prompts * params.n}", "prompt")
    listed = len(params.logit_bias or ()) + len(params.stop_token_ids or ())
    if prompts > 1 and prompts * listed > MAX_LISTED:
        raise InvalidRequest(
            f"prompts times entries of logit_bias and stop_token_ids must be at most {MAX_LISTED}", "prompt"
        )


def _check_scores(prompts: Sequence[Prompt], params: SamplingParams) -> None:
    if params.prompt_logprobs is None:
        return
    count = sum(len(prompt.tokens) for prompt in prompts) * params.n * (params.prompt_logprobs + 1)
    if count > MAX_SCORES:
        raise InvalidRequest(
            f"this asks for {count} log-probabilities of prompt tokens (tokens times n times alternatives and the "
            f"token itself), but one answer holds at most {MAX_SCORES}",
            "prompt_logprobs",
        )


def _echoed(generation: Generation) -> dict[str, list[Any]] | None:
    """The log-probabilities that come before those of each choice's own tokens; None if none do."""
    job = generation.job
    if job.echo is None or job.params.logprobs is None:
        return None
    return completion_logprobs(generation.prompt_entries(), job.params.logprobs)


def _logprobs(
    generation: Generation, entries: Sequence[LogprobEntry], echoed: dict[str, list[Any]] | None
) -> dict[str, list[Any]] | None:
    count = generation.job.params.logprobs
    if count is None:
        return None
    own = completion_logprobs(entries, count)
    return own if echoed is None else {name: echoed[name] + values for name, values in own.items()}


class _Chunks:
    """Chunks of completions. An echo is the first text of each choice; with log-probabilities it waits for them."""

    def __init__(self, head: Head) -> None:
        self.head = head.opening
        self._begun: set[int] = set()  # choices whose echo was sent
        self._echoed: dict[int, dict[str, list[Any]] | None] = {}  # by prompt

    def opening(self, index: int, generation: Generation) -> bytes:
        job = generation.job
        if not job.echo or job.params.logprobs is not None:
            return b""
        return _MIDDLE % (index, _text(job.echo), b"null")

    async def prepare(self, position: int, generation: Generation) -> None:
        """Make the echo's log-probabilities, of which each choice's first chunk has all."""
        self._echoed[position] = await off_loop_if(has_many_scores([generation]), _echoed, generation)

    def choice(self, index: int, generation: Generation, update: Update) -> bytes:
        sample, job = generation.samples[update.sample], generation.job
        echoed = self._once(index, generation)
        text = _text(update.text if echoed is None else (job.echo or "") + update.text)
        logprobs = _text(_logprobs(generation, update.entries, echoed))
        if sample.finish_reason is None:
            return _MIDDLE % (index, text, logprobs)
        return _LAST % (index, text, logprobs, _text(sample.finish_reason), _text(sample.stop_reason))

    def _once(self, index: int, generation: Generation) -> dict[str, list[Any]] | None:
        """The echo's log-probabilities, for the first chunk of a choice."""
        if index in self._begun:
            return None
        self._begun.add(index)
        return self._echoed[index // generation.job.params.n]


_MIDDLE = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null,"stop_reason":null}'
_LAST = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}'

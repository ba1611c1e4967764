"""POST /v1/completions"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from aiohttp import web

from services.gateway.api_requests import CompletionRequest
from services.gateway.body import read
from services.gateway.bounds import CHARACTERS_PER_ID, MAX_LISTED, MAX_SAMPLES, check_repeated
from services.gateway.gateway import GATEWAY, Gateway, begin_response
from services.gateway.generation import Generation, Update
from services.gateway.logprobs import completion_logprobs, has_many_logprobs, prompt_logprobs
from services.gateway.prompt import (
    LONG_TEXT,
    PreparedPrompt,
    TokenizedPrompt,
    bad_word_tokens,
    completion_prompts,
    truncation_of,
)
from services.gateway.response import ResponseHead, StreamedTokenIds, has_many_ids, raw_ids, to_json, usage
from services.gateway.sampling import DEFAULT_COMPLETION_TOKENS, beam_settings, completion_params, priority_of
from services.gateway.stream import collect, stream
from services.gateway.structured_outputs import compile_grammar
from services.gateway.threads import run_in_thread_if
from shared.errors import InvalidRequest
from shared.params import SamplingParams, cache_salt
from shared.protocol import Welcome
from shared.text.logprobs import LogprobEntry
from shared.text.sample_text import SampleText

MAX_PROMPT_LOGPROBS = 1_000_000
"""Log-probabilities of prompt tokens in one response, alternatives included. They are about 30 MB of JSON."""


async def completions(http: web.Request) -> web.StreamResponse:
    """Answer with the continuations of each prompt, whole or as a stream. Choice i is sample i % n of prompt i // n."""
    gateway, arrived = http.app[GATEWAY], time.monotonic()
    begin_response(http, "cmpl-")
    request = await read(http, CompletionRequest)
    id = begin_response(http, "cmpl-", request.request_id)
    prompts = await _prepare(gateway, request, arrived, id)
    head = ResponseHead.now(id, "text_completion", prompts[0].adapter or gateway.model.name)
    if request.stream:
        return await stream(http, gateway, prompts, _ChunkEncoder(head, request), request.stream_options)
    generations = await collect(gateway, prompts)
    takes_long = has_many_logprobs(generations) or (request.return_token_ids is True and has_many_ids(generations))
    return await run_in_thread_if(takes_long, _respond, head, request, generations)


def _respond(head: ResponseHead, request: CompletionRequest, generations: Sequence[Generation]) -> web.Response:
    choices: list[dict[str, Any]] = []
    for prompt_index, generation in enumerate(generations):
        choices += _choices(prompt_index, generation, request)
    return head.respond(choices, usage=usage(generations))


async def _prepare(gateway: Gateway, request: CompletionRequest, arrived: float, id: str) -> list[PreparedPrompt]:
    model = gateway.model
    adapter = await gateway.choose_adapter(request.model)
    params = completion_params(request, model.defaults)
    beams = beam_settings(request)
    grammar = await compile_grammar(request, model)
    bad_words = await bad_word_tokens(params, model.tokenizer)
    salt = cache_salt(request.cache_salt)
    welcome = await gateway.backend.first_welcome()
    default_max_tokens = _default_tokens(gateway)
    prompts = await tokenize_completion(gateway, request, params, welcome)
    _check_samples(len(prompts), params, params.n if beams is None else beams.width, sum(map(len, bad_words)))
    priority = priority_of(request)
    _check_prompt_logprobs(prompts, params)
    prepared: list[PreparedPrompt] = []
    for prompt_index, prompt in enumerate(prompts):
        prepared.append(
            gateway.prepare(
                prompt,
                welcome,
                params,
                default_max_tokens=default_max_tokens,
                priority=priority,
                arrived=arrived,
                request_id=id if len(prompts) == 1 else f"{id}-{prompt_index}",
                samples_before=prompt_index * params.n,
                echo=request.echo is True,
                grammar=grammar,
                beams=beams,
                bad_words=bad_words,
                cache_salt=salt,
                adapter=adapter,
                lacks_template=beams is None and request.echo is not True,  # an echo is not empty
            )
        )
        await asyncio.sleep(0)  # let other requests run in between
    check_repeated("echo", sum(len(prompt.echo or "") for prompt in prepared), params.n)
    if request.return_token_ids:
        check_repeated("return_token_ids", CHARACTERS_PER_ID * sum(len(prompt.tokens) for prompt in prepared), params.n)
    return prepared


def _default_tokens(gateway: Gateway) -> int:
    """Return the number of tokens of a completion that sets no max_tokens."""
    tokens = gateway.model.defaults.max_tokens
    return DEFAULT_COMPLETION_TOKENS if tokens is None else tokens


async def tokenize_completion(
    gateway: Gateway, request: CompletionRequest, params: SamplingParams, welcome: Welcome, *, must_fit: bool = True
) -> list[TokenizedPrompt]:
    """Return the prompts of a completion, cut if it asks for that.

    Raise `InvalidRequest`, also if one does not fit though it `must_fit`.
    """
    return await completion_prompts(
        request,
        gateway.model.tokenizer,
        max_model_len=welcome.max_model_len,
        vocab_size=welcome.model.vocab_size,
        truncation=truncation_of(request, params, _default_tokens(gateway), welcome.max_model_len),
        must_fit=must_fit,
    )


def _choices(prompt_index: int, generation: Generation, request: CompletionRequest) -> list[dict[str, Any]]:
    """Return the choices of one prompt."""
    prompt = generation.prompt
    as_ids = request.return_tokens_as_token_ids is True
    echo_logprobs = _echo_logprobs(generation, as_ids)
    prompt_ids = raw_ids(prompt.tokens) if request.return_token_ids else None
    of_prompt = None
    if request.prompt_logprobs is not None and prompt.params.prompt_logprobs is not None:
        of_prompt = prompt_logprobs(generation.text.prompt_logprobs(), prompt.params.prompt_logprobs)
    return [
        {
            "index": prompt_index * prompt.params.n + index,
            "text": (prompt.echo or "") + sample.text,
            "logprobs": _logprobs(generation, generation.logprobs[index], echo_logprobs, as_ids),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "prompt_logprobs": of_prompt,
            **({"prompt_token_ids": prompt_ids, "token_ids": raw_ids(sample.token_ids)} if prompt_ids else {}),
        }
        for index, sample in enumerate(generation.text.samples)
    ]


def _check_samples(num_prompts: int, params: SamplingParams, num_sequences: int, num_bad: int) -> None:
    """Raise `InvalidRequest` for too many prompts for what each has: sequences, and lists.

    `num_bad` counts the tokens of bad words.
    """
    num_samples = num_prompts * num_sequences
    if num_samples > MAX_SAMPLES:
        raise InvalidRequest(f"prompts times n (or beams) must be at most {MAX_SAMPLES}, got {num_samples}", "prompt")
    lists = (params.logit_bias, params.stop_token_ids, params.allowed_token_ids, params.logprob_token_ids)
    num_listed = sum(len(entries or ()) for entries in lists) + num_bad
    if num_prompts > 1 and num_prompts * num_listed > MAX_LISTED:
        raise InvalidRequest(
            "prompts times entries of logit_bias, stop_token_ids, allowed_token_ids, logprob_token_ids and tokens of "
            f"bad_words must be at most {MAX_LISTED}, got {num_prompts} times {num_listed}",
            "prompt",
        )


def _check_prompt_logprobs(prompts: Sequence[TokenizedPrompt], params: SamplingParams) -> None:
    if params.prompt_logprobs is None:
        return
    count = sum(len(prompt.tokens) for prompt in prompts) * params.n * (params.prompt_logprobs + 1)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"this asks for {count} log-probabilities of prompt tokens (tokens times n times alternatives and the "
            f"token itself), but one answer holds at most {MAX_PROMPT_LOGPROBS}",
            "prompt_logprobs",
        )


def _echo_logprobs(generation: Generation, as_ids: bool) -> dict[str, list[Any]] | None:
    """Return the log-probabilities of the echoed prompt, which each choice has before its own, or None."""
    prompt = generation.prompt
    if prompt.echo is None or prompt.params.logprobs is None:
        return None
    return completion_logprobs(generation.text.prompt_logprobs(), prompt.params.logprobs, as_ids)


def _logprobs(
    generation: Generation,
    entries: Sequence[LogprobEntry],
    echo_logprobs: dict[str, list[Any]] | None,
    as_ids: bool,
) -> dict[str, list[Any]] | None:
    if generation.prompt.params.logprobs is None:
        return None
    own = completion_logprobs(entries, generation.prompt.sampling.num_alternatives, as_ids)
    return own if echo_logprobs is None else {name: echo_logprobs[name] + values for name, values in own.items()}


class _ChunkEncoder:
    """Encodes the chunks of completions. An echo is the first text of each choice.

    If log-probabilities are requested, the echo waits for its own, which come with the first output.
    """

    def __init__(self, head: ResponseHead, request: CompletionRequest) -> None:
        self.prefix = head.chunk_prefix
        self._as_ids = request.return_tokens_as_token_ids is True
        self._token_ids = StreamedTokenIds() if request.return_token_ids else None
        self._begun: set[int] = set()  # choices whose first chunk has been made
        self._echo_logprobs: dict[int, dict[str, list[Any]] | None] = {}  # by prompt
        self._prompt_ids: dict[int, bytes] = {}  # JSON, by prompt

    def openings(self, index: int, generation: Generation) -> Iterable[tuple[bytes, bytes]]:
        prompt = generation.prompt
        if prompt.echo and prompt.params.logprobs is None:
            ids = self._ids(index, generation, None)
            self._begun.add(index)
            yield _MIDDLE % (index, to_json(prompt.echo), b"null", ids), b""

    async def prepare(self, prompt_index: int, generation: Generation) -> None:
        """Make what the first chunk of each choice has of the prompt: log-probabilities of the echo, and token ids."""
        many = has_many_logprobs([generation])
        self._echo_logprobs[prompt_index] = await run_in_thread_if(many, _echo_logprobs, generation, self._as_ids)
        if self._token_ids is not None:
            tokens = generation.prompt.tokens
            self._prompt_ids[prompt_index] = bytes(await run_in_thread_if(len(tokens) > LONG_TEXT, raw_ids, tokens))

    def choice(self, index: int, generation: Generation, update: Update) -> bytes:
        sample, prompt = generation.text.samples[update.sample], generation.prompt
        echo_logprobs = None if index in self._begun else self._echo_logprobs[index // prompt.params.n]
        text = to_json(update.text if echo_logprobs is None else (prompt.echo or "") + update.text)
        logprobs, ids = b"null", b""
        if prompt.params.logprobs is not None:
            logprobs = to_json(_logprobs(generation, update.logprobs, echo_logprobs, self._as_ids))
        if self._token_ids is not None:
            ids = self._ids(index, generation, sample)
        self._begun.add(index)
        if sample.finish_reason is None:
            return _MIDDLE % (index, text, logprobs, ids)
        return _LAST % (index, text, logprobs, to_json(sample.finish_reason), to_json(sample.stop_reason), ids)

    def _ids(self, index: int, generation: Generation, sample: SampleText | None) -> bytes:
        """Return the fields with token ids: those of a choice's next output, and in its first chunk the prompt's."""
        if self._token_ids is None:
            return b""
        ids = b',"token_ids":' + to_json([] if sample is None else self._token_ids.take(index, sample))
        if index not in self._begun:
            ids += b',"prompt_token_ids":' + self._prompt_ids[index // generation.prompt.params.n]
        return ids


_MIDDLE = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null,"stop_reason":null%b}'
_LAST = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}'

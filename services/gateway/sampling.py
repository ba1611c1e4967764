"""From a request's fields to `SamplingParams`, with the defaults for what it leaves open.

A field that is null or absent takes the model's default (generation_config.json), then vLLM's. Without max_tokens a
completion takes 16 and a chat the rest of the context, or generation_config's max_new_tokens, at most what is left.
"""

from typing import Any

import msgspec

from services.gateway.openai import ChatRequest, CompletionRequest, GenerationRequest, whole
from shared.errors import InvalidRequest
from shared.params import SamplingParams
from shared.text.generation import SamplingDefaults

COMPLETION_TOKENS = 16  # OpenAI's default

PLAIN = (
    "temperature", "top_p", "min_p", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "skip_special_tokens",
)  # fmt: skip
WHOLE = ("n", "top_k", "seed", "min_tokens", "prompt_logprobs")


def chat_params(request: ChatRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Parameters of a chat, `max_tokens` None if the request leaves it open. Raises `InvalidRequest`."""
    top = whole("top_logprobs", request.top_logprobs) or 0
    asked = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    tokens = whole(asked, getattr(request, asked))
    if tokens is not None and tokens < 0:
        raise InvalidRequest(f"{asked} must be at least 0, got {tokens}", asked)
    fields = _fields(request, defaults) | {"max_tokens": tokens}
    return SamplingParams(**fields, top_logprobs=top if request.logprobs else None)


def completion_params(request: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Parameters of a completion, `max_tokens` None if the request leaves it open. Raises `InvalidRequest`.

    An echo with log-probabilities needs those of the prompt too.
    """
    fields = _fields(request, defaults) | {"max_tokens": whole("max_tokens", request.max_tokens)}
    logprobs = whole("logprobs", request.logprobs)
    if request.echo and logprobs is not None:
        fields["prompt_logprobs"] = max(logprobs, fields.get("prompt_logprobs", 0))
    return SamplingParams(**fields, logprobs=logprobs)


def with_room(params: SamplingParams, default: int | None, room: int) -> SamplingParams:
    """`params` with an open `max_tokens` set to `default`, at most `room` tokens. None stands for all of the room."""
    if params.max_tokens is not None or default is None or room < 1:
        return params
    return msgspec.structs.replace(params, max_tokens=min(default, room))


def priority_of(request: GenerationRequest) -> int:
    """The request's priority; lower is served first. Raises `InvalidRequest` beyond 63 bits and sign."""
    priority = whole("priority", request.priority) or 0
    if not -(2**63) <= priority < 2**63:
        raise InvalidRequest("priority must be between -2**63 and 2**63 - 1", "priority")
    return priority


def _fields(request: GenerationRequest, defaults: SamplingDefaults) -> dict[str, Any]:
    given = {name: getattr(request, name) for name in PLAIN}
    given |= {name: whole(name, getattr(request, name)) for name in WHOLE}
    own = {name: value for name, value in defaults.given().items() if name != "max_tokens"}
    return own | {name: value for name, value in given.items() if value is not None}

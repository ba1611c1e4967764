"""From a request's fields to `SamplingParams`, with the defaults for what it leaves open.

A field that is null or absent takes the model's default (generation_config.json), then vLLM's. Without max_tokens a
completion takes 16 and a chat the rest of the context, or generation_config's max_new_tokens, at most what is left.
"""

from typing import Any

import msgspec

from services.gateway.openai import ChatRequest, CompletionRequest, GenerationRequest
from shared.errors import InvalidRequest, brief
from shared.params import SamplingParams, whole
from shared.text.sampling_defaults import SamplingDefaults

COMPLETION_TOKENS = 16  # OpenAI's default

GIVEN = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "prompt_logprobs", "skip_special_tokens",
)  # fmt: skip
"""Fields that go into `SamplingParams` as they are, under the same names; it checks and converts them."""


def chat_params(request: ChatRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Parameters of a chat, `max_tokens` None if the request leaves it open. Raises `InvalidRequest`."""
    asked = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    tokens = _whole_or_none(request, asked)
    if tokens is not None and not 0 <= tokens < 2**63:
        raise InvalidRequest(f"{asked} must be between 0 and 2**63 - 1, got {brief(tokens)}", asked)
    fields = _fields(request, defaults) | {"max_tokens": tokens}
    top = _whole_or_none(request, "top_logprobs") or 0
    return SamplingParams(**fields, top_logprobs=top if request.logprobs else None)


def completion_params(request: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Parameters of a completion, `max_tokens` None if the request leaves it open. Raises `InvalidRequest`.

    An echo with log-probabilities needs those of the prompt too.
    """
    fields = _fields(request, defaults) | {"max_tokens": request.max_tokens}
    logprobs = _whole_or_none(request, "logprobs")
    if request.echo and logprobs is not None:
        fields["prompt_logprobs"] = max(logprobs, whole("prompt_logprobs", fields.get("prompt_logprobs", 0)))
    return SamplingParams(**fields, logprobs=logprobs)


def with_room(params: SamplingParams, default: int | None, room: int) -> SamplingParams:
    """`params` with an open `max_tokens` set to `default`, at most `room` tokens. None stands for all of the room."""
    if params.max_tokens is not None or default is None or room < 1:
        return params
    return msgspec.structs.replace(params, max_tokens=min(default, room))


def priority_of(request: GenerationRequest) -> int:
    """The request's priority; lower is served first. Raises `InvalidRequest` beyond 63 bits and sign."""
    priority = _whole_or_none(request, "priority") or 0
    if not -(2**63) <= priority < 2**63:
        raise InvalidRequest("priority must be between -2**63 and 2**63 - 1", "priority")
    return priority


def _fields(request: GenerationRequest, defaults: SamplingDefaults) -> dict[str, Any]:
    given = {name: getattr(request, name) for name in GIVEN}
    own = {name: value for name, value in defaults.as_dict().items() if name != "max_tokens"}
    return own | {name: value for name, value in given.items() if value is not None}


def _whole_or_none(request: GenerationRequest, name: str) -> int | None:
    value = getattr(request, name)
    return None if value is None else whole(name, value)

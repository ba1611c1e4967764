"""Makes `SamplingParams` from a request's fields, with defaults for those that are null or absent.

The default is the model's (generation_config.json), or else vLLM's. Without `max_tokens`, the model's max_new_tokens
applies; if there is none, a completion generates 16 tokens, and a chat the rest of the context.
"""

from typing import Any

import msgspec

from services.gateway.api_requests import ChatRequest, CompletionRequest, GenerationRequest
from shared.beam_params import REFUSED, BeamSettings, check_temperature
from shared.errors import InvalidRequest, brief
from shared.params import RepetitionDetectionParams, SamplingParams, whole
from shared.text.sampling_defaults import SamplingDefaults

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default

COPIED_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
    "repetition_detection", "stream_interval", "thinking_token_budget", "logprob_token_ids",
)  # fmt: skip
"""Fields that are passed to `SamplingParams` unchanged, which checks and converts them."""

BEAM_FIELDS = frozenset(
    {
        "n", "temperature", "seed", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
        "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
    }
)  # fmt: skip
"""Those of the copied fields that a beam search takes: it honours them, or they cannot change it (seed)."""

_DEFAULTS = msgspec.structs.asdict(SamplingParams())
_OFF = (("top_k", -1), ("thinking_token_budget", -1))
_NOTHING: tuple[Any, ...] = (None, [], {}, RepetitionDetectionParams())  # values of any field that ask for nothing


def chat_params(request: ChatRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Return the parameters of a chat, with `max_tokens` None if the request has none. Raise `InvalidRequest`."""
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = _whole_or_none(request, name)
    if max_tokens is not None and not 0 <= max_tokens < 2**63:
        raise InvalidRequest(f"{name} must be between 0 and 2**63 - 1, got {brief(max_tokens)}", name)
    fields = _fields(request, defaults) | {"max_tokens": max_tokens}
    top_logprobs = _whole_or_none(request, "top_logprobs") or 0
    return SamplingParams(**fields, top_logprobs=top_logprobs if request.logprobs else None)


def completion_params(request: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Return the parameters of a completion, with `max_tokens` None if the request has none. Raise `InvalidRequest`.

    An echo with log-probabilities needs those of the prompt too.
    """
    fields = _fields(request, defaults) | {"max_tokens": request.max_tokens}
    logprobs = _whole_or_none(request, "logprobs")
    if request.echo and logprobs is not None:
        fields["prompt_logprobs"] = max(logprobs, whole("prompt_logprobs", fields.get("prompt_logprobs", 0)))
    return SamplingParams(**fields, logprobs=logprobs)


def beam_settings(request: GenerationRequest) -> BeamSettings | None:
    """Return the settings of a beam search; None if the request does not want one. Raise `InvalidRequest`.

    There are `best_of` beams, or else `n`. A beam search is not random: parameters of sampling must ask for nothing.
    """
    if not request.use_beam_search:
        return None
    name = "n" if request.best_of is None else "best_of"
    for field in COPIED_FIELDS:
        value = getattr(request, field)
        asks = value not in (*_NOTHING, _DEFAULTS[field]) and (field, value) not in _OFF
        if asks and field not in BEAM_FIELDS:
            raise InvalidRequest(f"{field} {REFUSED}, got {brief(value)}", field)
    if request.temperature is not None:
        check_temperature(request.temperature)
    width = getattr(request, name)
    return BeamSettings.checked(name, 1 if width is None else width, request.length_penalty)


def priority_of(request: GenerationRequest) -> int:
    """Return the request's priority; a lower one is served first. Raise `InvalidRequest` if it exceeds 64 bits."""
    priority = _whole_or_none(request, "priority") or 0
    if not -(2**63) <= priority < 2**63:
        raise InvalidRequest(f"priority must be between -2**63 and 2**63 - 1, got {brief(priority)}", "priority")
    return priority


def _fields(request: GenerationRequest, defaults: SamplingDefaults) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the request has, over those that the model's defaults have."""
    requested = {name: getattr(request, name) for name in COPIED_FIELDS}
    model_defaults = {name: value for name, value in defaults.as_dict().items() if name != "max_tokens"}
    return model_defaults | {name: value for name, value in requested.items() if value is not None}


def _whole_or_none(request: GenerationRequest, name: str) -> int | None:
    value = getattr(request, name)
    return None if value is None else whole(name, value)

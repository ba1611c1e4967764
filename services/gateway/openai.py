"""The bodies of OpenAI's API, as structs that decode and check themselves.

What is accepted is honoured: a field that is not declared here is refused by its name (those in `unsupported.py` may be
there if they ask for nothing), and so is a declared one that is set to something not supported. Null means the
default, everywhere. Whole numbers may be written as 5.0, since some clients' languages have no other numbers.
"""

import re
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from services.gateway.unsupported import without_neutral
from shared.errors import InvalidRequest

Integer = int | float
R = TypeVar("R", bound="GenerationRequest")


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries besides the text."""

    include_usage: bool | None = None  # one more chunk, the last, with the usage
    continuous_usage_stats: bool | None = None  # with the former: usage so far in every chunk


class GenerationRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take. Fields that OpenAI does not have are vLLM's."""

    model: str | None = None
    max_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    n: Integer | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: Integer | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Integer | None = None
    user: str | None = None  # OpenAI's label for abuse reports: taken, not used, like the next two
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    response_format: dict[str, Any] | None = None  # only {"type": "text"}, which is the default


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    max_completion_tokens: Integer | None = None  # wins over max_tokens
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None  # only an empty list
    tool_choice: str | dict[str, Any] | None = None  # only none and auto, which are the same without tools
    parallel_tool_calls: bool | None = None  # nothing to do without tools


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = None  # only equal to n
    suffix: str | None = None  # only empty


def decode(body: bytes, kind: type[R]) -> R:
    """The request in `body`. Raises `InvalidRequest` naming the field at fault, where there is one."""
    try:
        request = _decode(body, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    _check(request)
    return request


def whole(name: str, value: Integer | None) -> int | None:
    """A whole number, however it was written. Raises `InvalidRequest`."""
    if isinstance(value, float) and not value.is_integer():
        raise InvalidRequest(f"{name} must be a whole number, got {value}", name)
    if value is not None and abs(value) >= 2**64:
        raise InvalidRequest(f"{name} has more than 64 bits", name)
    return None if value is None else int(value)


_DECODERS: dict[type[Any], "msgspec.json.Decoder[Any]"] = {}


def _decoder(kind: type[R]) -> "msgspec.json.Decoder[R]":
    return _DECODERS.setdefault(kind, msgspec.json.Decoder(kind))


def _decode(body: bytes, kind: type[R]) -> R:
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError:
        whole_body = msgspec.json.decode(body)
        if not isinstance(whole_body, dict):
            raise
        rest = without_neutral(whole_body, frozenset(kind.__struct_fields__))
        if len(rest) == len(whole_body):
            raise
    return _decoder(kind).decode(msgspec.json.encode(rest))


def _invalid(message: str) -> InvalidRequest:
    """msgspec's words, with the path made a parameter's name."""
    what, _, where = message.partition(" - at ")
    path = re.sub(r"^.*?`?\$\.?|`|\[\.\.\.\]", "", where)
    if field := re.search(r"(unknown|missing required) field `(.*)`", what):
        path = f"{path}.{field[2]}" if path else field[2]
        what = "is missing" if field[1] == "missing required" else "is not a field of this request"
        return InvalidRequest(f"{path} {what}", path)
    return InvalidRequest(f"{path}: {what}" if path else f"the body is wrong: {what}", path or None)


def _check(request: GenerationRequest) -> None:
    """Combinations that are wrong whatever the model."""
    form = request.response_format
    if form is not None and form != {"type": "text"}:
        raise InvalidRequest(f"response_format {form.get('type')!r} is not supported, only 'text'", "response_format")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs is not supported in a stream", "prompt_logprobs")
    match request:
        case ChatRequest():
            _check_chat(request)
        case CompletionRequest():
            _check_completion(request)


def _check_chat(request: ChatRequest) -> None:
    if request.tools:
        raise InvalidRequest("tools are not supported", "tools")
    if request.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools, which are not supported", "tool_choice")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")


def _check_completion(request: CompletionRequest) -> None:
    if request.suffix:
        raise InvalidRequest("suffix is not supported", "suffix")
    if request.best_of is not None and request.best_of != (1 if request.n is None else request.n):
        raise InvalidRequest("best_of is supported only where it equals n", "best_of")

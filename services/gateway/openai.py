"""The bodies of OpenAI's API, as structs that decode and check themselves.

What is accepted is honoured: a declared field that is set to something not supported is refused by its name, as is a
foreign one that would change the answer (`unsupported.py`). A field that nobody here knows is ignored, and its name
returned; with `strict` it is refused. Null means the default, everywhere. Whole numbers may be written as 5.0, since
some clients' languages have no other numbers.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from services.gateway.bounds import check_values
from services.gateway.unsupported import STREAM_HINTS, unknown
from shared.errors import InvalidRequest, brief
from shared.params import whole

Integer = int | float
R = TypeVar("R", bound="GenerationRequest")


class StreamOptions(Struct, frozen=True):
    """What a stream carries besides the text."""

    include_usage: bool | None = None  # one more chunk, the last, with the usage
    continuous_usage_stats: bool | None = None  # with the former: usage so far in every chunk


class GenerationRequest(Struct, frozen=True, kw_only=True):
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
    logit_bias: dict[str, Any] | None = None  # checked with the parameters, which name the key at fault
    prompt_logprobs: Integer | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Integer | None = None
    response_format: dict[str, Any] | None = None  # only {"type": "text"}, which is the default


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    max_completion_tokens: Integer | None = None  # wins over max_tokens
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = None  # only equal to n


INSIDE = {
    "stream_options": STREAM_HINTS.union(StreamOptions.__struct_fields__),
    "response_format": frozenset({"type"}),
}
"""The fields of objects in a request. Those of messages are not here: a template gets them all."""

NAME = 100
"""Characters of an unknown field's name that are shown."""

_GIVEN = msgspec.json.Decoder(dict[str, Raw])  # passes over the values, and builds nothing of them
_DECODERS: dict[type[Any], "msgspec.json.Decoder[Any]"] = {}


def decode(body: bytes, kind: type[R], *, strict: bool = False) -> tuple[R, list[str]]:
    """Return the request in `body`, and the names of its fields that are ignored because nobody here knows them.

    Raises `InvalidRequest` naming the field at fault, where there is one; if `strict`, for unknown fields too.
    """
    body = body.removeprefix(BOM_UTF8)  # which some clients write, and RFC 8259 lets a reader ignore
    check_values(body)
    try:
        given = _GIVEN.decode(body)
        ignored = unknown(given, kind.__struct_fields__)
        request = _decoder(kind).decode(body)
        ignored += _unknown_inside(given, request)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if strict and ignored:
        raise InvalidRequest(f"{ignored[0][:NAME]} is not a field of this request", ignored[0][:NAME])
    _check(request)
    return request, ignored


def _decoder(kind: type[R]) -> "msgspec.json.Decoder[R]":
    return _DECODERS.setdefault(kind, msgspec.json.Decoder(kind))


def _unknown_inside(given: Mapping[str, Raw], request: GenerationRequest) -> list[str]:
    """Return the unknown fields of the objects in a request, by their paths."""
    inside = [(outer, name) for outer in INSIDE if getattr(request, outer) for name in _GIVEN.decode(given[outer])]
    return [f"{outer}.{name}" for outer, name in inside if name not in INSIDE[outer]]


def _invalid(message: str) -> InvalidRequest:
    """msgspec's words, with the path made a parameter's name."""
    what, _, where = message.partition(" - at ")
    path = re.sub(r"^.*?`?\$\.?|`|\[\.\.\.\]", "", where)
    if field := re.search(r"missing required field `(.*)`", what):
        path = f"{path}.{field[1]}" if path else field[1]
        return InvalidRequest(f"{path} is missing", path)
    return InvalidRequest(f"{path}: {what}" if path else f"the body is wrong: {what}", path or None)


def _check(request: GenerationRequest) -> None:
    """Combinations that are wrong whatever the model."""
    form = request.response_format
    if form is not None and form.get("type") != "text":
        what = f"response_format {brief(form.get('type'))} is not supported, only 'text'"
        raise InvalidRequest(what, "response_format")
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
    check_values(b",".join(_arguments(request.messages)))
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")


def _arguments(messages: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the JSON texts in a history's tool calls, which are decoded as well before a template sees them."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in [message.get("function_call"), *(calls if isinstance(calls, list) else ())]:
            if isinstance(call, dict):
                function = call.get("function", call)
                text = function.get("arguments") if isinstance(function, dict) else None
                if isinstance(text, str):
                    yield text.encode()


def _check_completion(request: CompletionRequest) -> None:
    if request.best_of is not None and whole("best_of", request.best_of) != (1 if request.n is None else request.n):
        raise InvalidRequest("best_of is supported only where it equals n", "best_of")

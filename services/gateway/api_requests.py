"""Decodes and checks the request bodies of OpenAI's API, and of /tokenize and /detokenize.

No accepted field is ignored. A declared field with an unsupported value is refused by name, and so is a field of
other servers that would change the answer (`unsupported_fields.py`). An unknown field is ignored and its name returned,
or it is refused if `strict`. Null always means the default. Whole numbers may be written as 5.0, since some languages
have no integers.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct

from services.gateway.bounds import MAX_ID_LENGTH, check_values, is_id
from services.gateway.tools import check_tools
from services.gateway.unsupported_fields import STREAM_HINTS, unknown_fields
from shared.errors import InvalidRequest, brief
from shared.params import RepetitionDetectionParams, whole

Integer = int | float
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
RequestT = TypeVar("RequestT", bound=Struct)


class StreamOptions(Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool | None = None  # add a last chunk with the usage
    continuous_usage_stats: bool | None = None  # with include_usage: add the usage so far to every chunk


class SamplingFields(Struct, frozen=True, kw_only=True):
    """The fields that all endpoints accept which generate. Those that OpenAI does not have are vLLM's."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[str, Any] | None = None  # `SamplingParams` checks it, so that the error names the key
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    thinking_token_budget: Integer | None = None  # tokens of reasoning; -1: any number
    stream: bool | None = None
    stream_interval: Integer | None = None  # tokens of a chunk
    priority: Integer | None = None
    cache_salt: str | None = None
    request_id: str | None = None  # unless the request has the header X-Request-Id
    structured_outputs: dict[str, Any] | None = None


class GenerationRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields that chats and completions accept besides."""

    max_tokens: Integer | None = None
    n: Integer | None = None
    best_of: Integer | None = None  # beams of which n are returned; without a beam search only equal to n
    use_beam_search: bool | None = None
    length_penalty: float | None = None  # of a beam search
    prompt_logprobs: Integer | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Integer | None = None  # tokens that are kept; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # where tokens are dropped; by default left
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None  # of guided_json


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    max_completion_tokens: Integer | None = None  # wins over max_tokens
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    echo: bool | None = None  # begin with the last message, if its role is the one that answers
    return_prompt_text: bool | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None  # for the template
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # false: only the first call is kept
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None  # false: reasoning is left out of the answer


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Integer | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/responses. `responses_input.py` makes a chat of it, and checks what the types here leave open."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # false: only the first call is kept
    text: dict[str, Any] | None = None  # the form of the answer
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Integer | None = None
    top_logprobs: Integer | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # refused unless they ask for nothing
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    # taken, and without effect; the answer has most of them
    max_tool_calls: Integer | None = None  # of built-in tools
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    # vLLM's, and as in a chat
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeChatRequest(ChatRequest, frozen=True, kw_only=True):
    """POST /tokenize: the body of a chat. Fields that do not shape its prompt have no effect."""

    return_token_strs: bool | None = None


class TokenizeCompletionRequest(CompletionRequest, frozen=True, kw_only=True):
    """POST /tokenize: the body of a completion. Fields that do not shape its prompt have no effect."""

    prompt: str
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /detokenize"""

    tokens: list[int]
    model: str | None = None


class LoadAdapterRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter"""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None  # an adapter of this name may be there, and is replaced
    is_3d_lora_weight: bool | None = None


class UnloadAdapterRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/unload_lora_adapter"""

    lora_name: str
    lora_int_id: int | None = None  # names identify adapters here


NESTED_FIELDS = {
    "stream_options": STREAM_HINTS.union(StreamOptions.__struct_fields__),
    "response_format": frozenset({"type", "json_schema", "format", "structures", "triggers"}),
    "repetition_detection": frozenset(RepetitionDetectionParams.__struct_fields__),
}
"""The known fields of objects in a request. Messages and tools are missing here: all of theirs go to the template."""

MAX_NAME = 100  # characters of an unknown field's name in an error

_RAW_FIELDS = msgspec.json.Decoder(dict[str, Raw])  # does not decode the values
_DECODERS: dict[type[Any], "msgspec.json.Decoder[Any]"] = {}


def decode(body: bytes, *request_types: type[RequestT], strict: bool = False) -> tuple[RequestT, list[str]]:
    """Return the request in `body`, and the names of its unknown fields, which are ignored.

    If there are several types, the body's fields tell which one it is of. Raise `InvalidRequest`, which names the wrong
    field if there is one. If `strict`, unknown fields are wrong too.
    """
    body = body.removeprefix(BOM_UTF8)  # some clients write it, and RFC 8259 allows parsers to ignore it
    check_values(body)  # not too many to decode
    try:
        fields = _RAW_FIELDS.decode(body)
        request_type = _type_of(fields, request_types)
        ignored = unknown_fields(fields, request_type.__struct_fields__)
        request = _decoder(request_type).decode(body)
        ignored += _unknown_nested_fields(fields, request)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidRequest):
            raise error.__cause__ from None
        raise _invalid(str(error)) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if strict and ignored:
        raise InvalidRequest(f"{ignored[0][:MAX_NAME]} is not a field of this request", ignored[0][:MAX_NAME])
    _check(request)
    return request, ignored


def _decoder(request_type: type[RequestT]) -> "msgspec.json.Decoder[RequestT]":
    return _DECODERS.setdefault(request_type, msgspec.json.Decoder(request_type))


def _type_of(fields: Mapping[str, Raw], request_types: Sequence[type[RequestT]]) -> type[RequestT]:
    """Return the only type whose required fields are there, or the first one if there is none."""
    required = {
        request_type: {field.encode_name for field in msgspec.structs.fields(request_type) if field.required}
        for request_type in request_types
    }
    fitting = [request_type for request_type, names in required.items() if names <= fields.keys()]
    if len(fitting) > 1:
        names = sorted(set().union(*required.values()))
        raise InvalidRequest(f"only one of {' and '.join(names)} can be used", names[-1])
    return fitting[0] if fitting else request_types[0]


def _unknown_nested_fields(fields: Mapping[str, Raw], request: Struct) -> list[str]:
    """Return the paths of the unknown fields in objects of a request."""
    return [
        f"{outer}.{name}"
        for outer, known_names in NESTED_FIELDS.items()
        if getattr(request, outer, None)
        for name in _RAW_FIELDS.decode(fields[outer])
        if name not in known_names
    ]


def _invalid(message: str) -> InvalidRequest:
    """Return the API's error for a message of msgspec. The JSON path in the message becomes the error's parameter."""
    problem, _, json_path = message.partition(" - at ")
    path = re.sub(r"^.*?`?\$\.?|`|\[\.\.\.\]", "", json_path)
    if field := re.search(r"missing required field `(.*)`", problem):
        path = f"{path}.{field[1]}" if path else field[1]
        return InvalidRequest(f"{path} is missing", path)
    return InvalidRequest(f"{path}: {problem}" if path else f"the body is wrong: {problem}", path or None)


def _check(request: Struct) -> None:
    """Raise `InvalidRequest` for values and combinations of fields that are not supported, whatever the model."""
    if isinstance(request, GenerationRequest):
        check_generation(request)


def check_generation(request: GenerationRequest) -> None:
    """Raise `InvalidRequest` for the same of a request that generates."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs is not supported in a stream", "prompt_logprobs")
    if request.request_id is not None and not is_id(request.request_id):
        raise InvalidRequest(
            f"request_id must be 1 to {MAX_ID_LENGTH} printable ASCII characters, got {brief(request.request_id)}",
            "request_id",
        )
    _check_beams(request)
    if isinstance(request, ChatRequest):
        _check_chat(request)
    elif isinstance(request, CompletionRequest) and request.logprob_token_ids and request.logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs to be a number", "logprob_token_ids")


def _check_beams(request: GenerationRequest) -> None:
    n = 1 if request.n is None else whole("n", request.n)
    best_of = n if request.best_of is None else whole("best_of", request.best_of)
    if request.use_beam_search:
        if best_of < n:
            raise InvalidRequest(f"best_of must be at least n, which is {n}, got {brief(best_of)}", "best_of")
    elif best_of != n:
        raise InvalidRequest(
            f"best_of must equal n, which is {n}, without use_beam_search, got {brief(best_of)}", "best_of"
        )
    elif request.length_penalty not in (None, 1.0):
        raise InvalidRequest(
            f"length_penalty needs use_beam_search, got {brief(request.length_penalty)}", "length_penalty"
        )


def _check_chat(request: ChatRequest) -> None:
    check_tools(request.tools or (), request.tool_choice)
    check_values(b",".join(_tool_call_arguments(request.messages)))  # nor in JSON inside strings
    if (request.chat_template_kwargs or {}).get("chat_template") is not None:
        raise InvalidRequest(
            "chat_template_kwargs must not hold chat_template, which is a field of the request", "chat_template_kwargs"
        )
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.logprob_token_ids and not request.logprobs:
        raise InvalidRequest("logprob_token_ids needs logprobs to be true", "logprob_token_ids")


def _tool_call_arguments(messages: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the JSON texts of tool calls in the messages, which are decoded before the template gets them."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in [message.get("function_call"), *(calls if isinstance(calls, list) else ())]:
            if isinstance(call, dict):
                function = call.get("function", call)
                text = function.get("arguments") if isinstance(function, dict) else None
                if isinstance(text, str):
                    yield text.encode()

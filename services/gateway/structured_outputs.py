"""What a request demands of its output's form: OpenAI's `response_format`, vLLM's `structured_outputs` and the older
`guided_...` fields, of which a request may use one. In a chat, `tool_choice` and `strict` of tools demand calls; and
where the model chooses, its calls follow their schemas too, if these can be enforced, since a client that gets wrong
arguments can do nothing but ask again.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from services.gateway.api_requests import ChatRequest, GenerationRequest
from services.gateway.served_model import ServedModel
from services.gateway.threads import run_in_thread
from services.gateway.tools import are_strict, must_call
from shared.errors import InvalidRequest, brief
from shared.structured_outputs import StructuredOutputsParams
from shared.text.lark import WRONG_SCHEMA, without_source
from shared.text.message_grammar import message_grammar
from shared.text.message_parser import MessageFormat

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's older fields, each of one kind."""


class Demand(NamedTuple):
    """A demand, and the field that makes it."""

    params: StructuredOutputsParams
    field: str


async def compile_grammar(request: GenerationRequest, model: ServedModel) -> str:
    """Return the grammar that a request's output has to follow, or "" if there is none. Raise `InvalidRequest`."""
    demand = _demand(request)
    return "" if demand is None else await run_in_thread(model.grammars.compile, *demand)


async def compile_chat_grammar(request: ChatRequest, model: ServedModel, format: MessageFormat | None) -> str:
    """Return the same for a chat whose outputs are taken apart by `format`, whose tools are those it may call."""
    if format is None:
        return await compile_grammar(request, model)
    demand = _demand(request)
    if demand is None and not format.tools:
        return ""
    if demand is None and not (must_call(request.tool_choice) or are_strict(request.tools or ())):
        # a search has no grammar
        return "" if request.use_beam_search else await run_in_thread(_compile_free_choice, model, format)
    return await run_in_thread(_compile_chat, request, model, format, demand)


def _compile_free_choice(model: ServedModel, format: MessageFormat) -> str:
    """Return the grammar of text and calls; "" if the tools' schemas cannot be enforced, which nobody has demanded."""
    try:
        grammar = message_grammar(format)
        model.grammars.check(grammar, "tools")
    except InvalidRequest:
        return ""
    return grammar


def _compile_chat(request: ChatRequest, model: ServedModel, format: MessageFormat, demand: Demand | None) -> str:
    answer = "" if demand is None else model.grammars.compile(*demand)
    field = demand.field if demand is not None and not format.tools else "tools"

    def write(format: MessageFormat) -> str:
        return message_grammar(format, answer, must_call=must_call(request.tool_choice))

    def check(format: MessageFormat) -> str:
        if grammar := write(format):
            model.grammars.check(grammar, field)
        return grammar

    for attempt in (write, check):  # writing it finds some mistakes, which need not be compiled
        try:
            grammar = attempt(format)
        except InvalidRequest as error:
            raise _of_tool(error, request, format, attempt) from error
    return grammar


def _of_tool(
    error: InvalidRequest, request: ChatRequest, format: MessageFormat, attempt: Callable[[MessageFormat], str]
) -> InvalidRequest:
    """Return an error of all tools as that of the first one whose schema is wrong, by its place in the request.

    Compiling stops at a wrong schema, so that looking for it takes no longer than compiling did.
    """
    if not error.message.startswith("tools: ") and WRONG_SCHEMA not in error.message:
        return error
    for index, tool in enumerate(request.tools or ()):
        name = tool["function"]["name"]
        if format.tools and name in format.tools:
            try:
                attempt(replace(format, tools={name: format.tools[name]}))
            except InvalidRequest as own:
                path = f"tools[{index}].function.parameters"
                return InvalidRequest(f"{path}{without_source(own.message).removeprefix('tools')}", path)
    return error


def _demand(request: GenerationRequest) -> Demand | None:
    """Return the demand on the form of the answer. Raise `InvalidRequest` if there are several, or it is none."""
    demands = {
        name: value
        for name in ("response_format", "structured_outputs", *GUIDED)
        if (value := getattr(request, name)) is not None and not _is_text(name, value)
    }
    if request.guided_whitespace_pattern is not None and "guided_json" not in demands:
        name = "guided_whitespace_pattern"
        raise InvalidRequest(f"{name} needs guided_json", name)
    if not demands:
        return None
    if len(demands) > 1:
        raise InvalidRequest(f"only one of {' and '.join(demands)} can be used", list(demands)[1])
    ((name, value),) = demands.items()
    return Demand(_params(name, value, request.guided_whitespace_pattern), name)


def _is_text(name: str, value: Any) -> bool:
    return name == "response_format" and value.get("type") == "text"


def _params(name: str, value: Any, whitespace_pattern: str | None) -> StructuredOutputsParams:
    match name:
        case "response_format":
            return _response_format(value)
        case "structured_outputs":
            return _structured_outputs(value)
        case "guided_json":
            return StructuredOutputsParams(json=value, whitespace_pattern=whitespace_pattern)
        case _:
            return StructuredOutputsParams(**{name.removeprefix("guided_"): value})


def _response_format(value: Mapping[str, Any]) -> StructuredOutputsParams:
    match value.get("type"):
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=_schema(value.get("json_schema")))
        case "structural_tag":
            return StructuredOutputsParams(structural_tag={key: value[key] for key in value if key != "type"})
        case other:
            kinds = "'text', 'json_object', 'json_schema' or 'structural_tag'"
            raise InvalidRequest(f"response_format.type must be {kinds}, got {brief(other)}", "response_format.type")


def _schema(value: Any) -> Mapping[str, Any] | bool:
    """Return the schema of `response_format.json_schema`. It is always enforced, with and without `strict`."""
    path = "response_format.json_schema"
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{path} must be an object, got {brief(value)}", path)
    if not isinstance(value.get("name"), str):
        raise InvalidRequest(f"{path}.name must be a text, got {brief(value.get('name'))}", f"{path}.name")
    schema = value.get("schema")
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequest(f"{path}.schema must be a JSON schema, got {brief(schema)}", f"{path}.schema")
    return schema


def _structured_outputs(value: Mapping[str, Any]) -> StructuredOutputsParams:
    try:
        return msgspec.convert(value, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidRequest):
            raise error.__cause__ from None
        raise InvalidRequest(f"structured_outputs: {error}", "structured_outputs") from error

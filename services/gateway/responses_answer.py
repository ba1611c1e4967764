"""Makes the response object as it is at its beginning, at its end, and if it has failed."""

import time
from typing import Any

from msgspec.structs import replace

from services.gateway.api_requests import ResponsesRequest
from services.gateway.errors import ApiError
from services.gateway.generation import Generation
from services.gateway.prompt import PreparedPrompt
from services.gateway.response import usage
from services.gateway.responses_objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from services.gateway.responses_output import OutputBuilder


def begun(request: ResponsesRequest, prompt: PreparedPrompt, id: str, model: str) -> Response:
    """Return the response to a request before it has output."""
    return Response(
        id=id,
        created_at=int(time.time()),
        model=model,
        instructions=request.instructions,
        max_output_tokens=_whole_or_none(request.max_output_tokens),
        max_tool_calls=_whole_or_none(request.max_tool_calls),
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": None, "summary": None} | (request.reasoning or {}),
        temperature=prompt.params.temperature,
        text={"format": {"type": "text"}} | _without_nulls(request.text or {}),
        tool_choice=request.tool_choice or "auto",
        tools=[{"description": None, "parameters": None, "strict": None} | tool for tool in request.tools or ()],
        top_logprobs=prompt.params.top_logprobs or 0,
        top_p=prompt.params.top_p,
        truncation=request.truncation or "disabled",
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
        service_tier=request.service_tier,
        user=request.user,
    )


def ended(response: Response, output: OutputBuilder, generation: Generation) -> Response:
    """Return the response with its whole output."""
    return replace(
        response,
        completed_at=int(time.time()),
        status="incomplete" if output.was_cut else "completed",
        incomplete_details=IncompleteDetails("max_output_tokens") if output.was_cut else None,
        output=output.items,
        usage=_usage(generation),
    )


def failed(response: Response, output: OutputBuilder, error: ApiError) -> Response:
    """Return the response with the output before an error."""
    reason = ResponseError("server_error" if error.status >= 500 else "invalid_prompt", error.message)
    return replace(response, status="failed", error=reason, output=output.items)


def _usage(generation: Generation) -> ResponseUsage:
    counts = usage([generation])
    return ResponseUsage(
        counts["prompt_tokens"],
        InputTokensDetails(counts["prompt_tokens_details"]["cached_tokens"]),
        counts["completion_tokens"],
        OutputTokensDetails(generation.num_reasoning_tokens or 0),
        counts["total_tokens"],
    )


def _whole_or_none(value: int | float | None) -> int | None:
    return None if value is None else int(value)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}

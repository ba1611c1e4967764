"""Compares answers with what `/openapi.json` says of them."""

from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.api_responses import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionResponse,
    CompletionStreamResponse,
    ErrorResponse,
)
from services.gateway.responses_objects import Response, StreamEvent

WHOLE: dict[str, type[Struct]] = {
    "/v1/chat/completions": ChatCompletionResponse,
    "/v1/completions": CompletionResponse,
    "/v1/responses": Response,
}
CHUNKS: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionStreamResponse,
    "/v1/completions": CompletionStreamResponse,
    "/v1/responses": StreamEvent,
}


def check_answer(path: str, answer: Any) -> None:
    """Check that a whole answer of a route that generates has the fields that are said of it, and no others."""
    check(answer, WHOLE[path])


def check_event(path: str, data: Any) -> None:
    """Check the same of the data of an event of its stream, which may be an error."""
    check(data, ErrorResponse if "error" in data else CHUNKS[path])


def check(answer: Any, response_type: Any) -> None:
    """Check that JSON has the fields of a type, and no others."""
    assert msgspec.to_builtins(msgspec.convert(answer, response_type)) == answer

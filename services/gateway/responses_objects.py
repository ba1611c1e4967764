"""The objects of OpenAI's Responses API: a response, its output items, and the events of its stream.

Requests are in `api_requests.py`. What a client has sent and gets back unchanged has no type here.
"""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from services.gateway.api_responses import ContentLogprob

ItemStatus: TypeAlias = Annotated[
    Literal["in_progress", "completed", "incomplete"], Meta(description="incomplete: it was cut off.")
]


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """What the model thought before it answered."""

    text: str


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: Annotated[
        list[ContentLogprob], Meta(description="With message.output_text.logprobs in include: an item for each token.")
    ] = []


class ReasoningItem(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The model's reasoning. It is shown as it is, and has no summary."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = []
    encrypted_content: None = None


class MessageItem(Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class FunctionCallItem(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function. `arguments` is JSON as the model wrote it, which may be cut off."""

    id: str
    status: ItemStatus
    call_id: Annotated[str, Meta(description="The id that the item with the function's output names.")]
    name: str
    arguments: str


Item: TypeAlias = ReasoningItem | MessageItem | FunctionCallItem


class IncompleteDetails(Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct, frozen=True):
    """Why a response has failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class InputTokensDetails(Struct, frozen=True):
    """Details of `input_tokens`."""

    cached_tokens: Annotated[int, Meta(description="Tokens that were found in the prefix cache.")]
    cache_write_tokens: Annotated[int, Meta(description="Always 0: to write the cache costs nothing.")] = 0


class OutputTokensDetails(Struct, frozen=True):
    """Details of `output_tokens`."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(Struct, frozen=True, kw_only=True):
    """A response. It has the settings of its request, with defaults for those that are missing there."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[Item] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    prompt_cache_key: str | None
    safety_identifier: str | None
    service_tier: str | None
    user: str | None
    background: Literal[False] = False
    previous_response_id: None = None
    store: Annotated[Literal[False], Meta(description="Responses are not kept, whatever the request says.")] = False


class Event(Struct, tag_field="type", kw_only=True):
    """An event of a stream."""

    sequence_number: int = 0  # set when it is sent


class ResponseCreated(Event, tag="response.created", kw_only=True):
    """An engine has accepted the request."""

    response: Response


class ResponseInProgress(Event, tag="response.in_progress", kw_only=True):
    """Output will come."""

    response: Response


class ResponseCompleted(Event, tag="response.completed", kw_only=True):
    """The last event, with the whole response."""

    response: Response


class ResponseIncomplete(Event, tag="response.incomplete", kw_only=True):
    """The last event of a response that is cut off."""

    response: Response


class ResponseFailed(Event, tag="response.failed", kw_only=True):
    """The last event of a response that the server could not finish."""

    response: Response


class OutputItemAdded(Event, tag="response.output_item.added", kw_only=True):
    """An item begins."""

    output_index: int
    item: Item


class OutputItemDone(Event, tag="response.output_item.done", kw_only=True):
    """An item is complete, or cut off."""

    output_index: int
    item: Item


class _PartEvent(Event, kw_only=True):
    """An event about a part of an item. There is one part in each item that has any."""

    item_id: str
    output_index: int
    content_index: int = 0


class ContentPartAdded(_PartEvent, tag="response.content_part.added", kw_only=True):
    """The part of a message or of reasoning begins."""

    part: OutputText | ReasoningText


class ContentPartDone(_PartEvent, tag="response.content_part.done", kw_only=True):
    """The part of a message or of reasoning is complete, or cut off."""

    part: OutputText | ReasoningText


class OutputTextDelta(_PartEvent, tag="response.output_text.delta", kw_only=True):
    """More text of a message."""

    delta: str
    logprobs: list[ContentLogprob]


class OutputTextDone(_PartEvent, tag="response.output_text.done", kw_only=True):
    """The whole text of a message."""

    text: str
    logprobs: list[ContentLogprob]


class ReasoningTextDelta(_PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    """More reasoning."""

    delta: str


class ReasoningTextDone(_PartEvent, tag="response.reasoning_text.done", kw_only=True):
    """The whole text of reasoning."""

    text: str


class FunctionCallArgumentsDelta(Event, tag="response.function_call_arguments.delta", kw_only=True):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class FunctionCallArgumentsDone(Event, tag="response.function_call_arguments.done", kw_only=True):
    """All of a call's arguments."""

    item_id: str
    output_index: int
    name: str
    arguments: str


StreamEvent: TypeAlias = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
)

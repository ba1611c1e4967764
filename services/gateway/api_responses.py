"""The answers of the API, as `/openapi.json` describes them.

Short answers are encoded from these structs. Those that generate are written piece by piece (`chat.py`,
`completions.py`, `message.py`, `logprobs.py`), since a struct for each token would take too long; the tests decode them
by these structs, and so notice a field that is missing here. A field of `UNSET` is absent.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType


class Error(Struct, frozen=True):
    """What went wrong."""

    message: str
    type: Annotated[str, Meta(description="OpenAI's name of the kind of error, such as BadRequestError.")]
    param: Annotated[str | None, Meta(description="The field that is wrong, if it is one.")]
    code: Annotated[int, Meta(description="The HTTP status.")]


class ErrorResponse(Struct, frozen=True):
    """Any refusal or failure. In a stream it is the data of an event."""

    error: Error


class ModelCard(Struct, frozen=True):
    """A name that requests can have as their model: of the served model itself, or of an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: Annotated[str, Meta(description="The value of --model, or the adapter's folder.")]
    parent: Annotated[str | None, Meta(description="The model that an adapter changes; null for the model itself.")]
    max_model_len: Annotated[
        int | None, Meta(description="Tokens of the context; null before the first engine has answered.")
    ]


class ModelList(Struct, frozen=True):
    """All names."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionResponse(Struct, frozen=True):
    """The installed version."""

    version: str


class LoadResponse(Struct, frozen=True):
    """The load of this gateway."""

    server_load: Annotated[int, Meta(ge=0, description="Requests that this gateway is working on.")]


class ResetResponse(Struct, frozen=True):
    """That every engine has forgotten its cached blocks."""

    success: bool


class TokenizeResponse(Struct, frozen=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: Annotated[int, Meta(description="Tokens of the context, which the prompt may exceed.")]
    tokens: list[int]
    token_strs: Annotated[list[str] | None, Meta(description="The tokens as the vocabulary spells them.")] = None


class DetokenizeResponse(Struct, frozen=True):
    """The text of some tokens."""

    prompt: str


class PromptTokensDetails(Struct, frozen=True):
    """Details of `prompt_tokens`."""

    cached_tokens: Annotated[int, Meta(description="Tokens that were found in the prefix cache.")]


class CompletionTokensDetails(Struct, frozen=True):
    """Details of `completion_tokens`."""

    reasoning_tokens: int


class UsageInfo(Struct, frozen=True):
    """Numbers of tokens. Each prompt counts once, whatever its number of samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TokenLogprob(Struct, frozen=True):
    """A token and its log-probability; null stands for minus infinity."""

    token: str
    logprob: float | None
    bytes: list[int]


class ContentLogprob(TokenLogprob, frozen=True):
    """A token of the output, with the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, frozen=True):
    """One item for each token of the output."""

    content: list[ContentLogprob]


class CompletionLogprobs(Struct, frozen=True):
    """Four lists with an item for each token of the text. The first token of an echoed prompt has no probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None]


class PromptLogprob(Struct, frozen=True):
    """The log-probability of a token of the prompt, and its place among all tokens; the likeliest has 1."""

    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None] | None,
    Meta(description="For each token of the prompt its own log-probability and those of the likeliest, by token id."),
]

StopReason = Annotated[str | int | None, Meta(description="The stop string or stop token that ended the sample.")]

TokenIds = Annotated[list[int], Meta(description="With return_token_ids: the ids of the output's tokens.")]
PromptTokenIds = Annotated[list[int], Meta(description="With return_token_ids: the ids of the prompt's tokens.")]
PromptText = Annotated[str, Meta(description="With return_prompt_text: the prompt as the template wrote it.")]


class FunctionCall(Struct, frozen=True):
    """A call of a function. `arguments` is JSON as the model wrote it, which may be wrong or cut off."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Struct, frozen=True):
    """The model's message. Reasoning has two names."""

    role: Annotated[str, Meta(description="assistant, or that of the last message if it is continued.")]
    content: str | None
    refusal: None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "repetition"]
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletionResponse(Struct, frozen=True):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: PromptTokenIds | UnsetType = UNSET
    prompt_text: PromptText | UnsetType = UNSET


class FunctionCallDelta(Struct, frozen=True):
    """A piece of a call: its name comes first and whole, its arguments in pieces."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """A piece of the call with this index. The first piece has the id and the type."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    """A piece of the model's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A piece of one of the `n` answers. The last piece has the reasons of its end."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "repetition"] | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletionStreamResponse(Struct, frozen=True):
    """The data of an event of a chat's stream. The last event is `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | UnsetType = UNSET
    prompt_token_ids: PromptTokenIds | UnsetType = UNSET
    prompt_text: PromptText | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True):
    """Sample `index % n` of prompt `index // n`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "repetition"]
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: PromptTokenIds | UnsetType = UNSET


class CompletionResponse(Struct, frozen=True):
    """The continuations of some prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class CompletionChunkChoice(Struct, frozen=True):
    """A piece of a sample. The last piece has the reasons of its end."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "repetition"] | None
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: PromptTokenIds | UnsetType = UNSET


class CompletionStreamResponse(Struct, frozen=True):
    """The data of an event of a completion's stream. The last event is `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | UnsetType = UNSET

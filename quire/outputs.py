"""The results of `LLM`: one `RequestOutput` for each prompt, with one `CompletionOutput` for each sample."""

from msgspec import Struct

from shared.text.logprobs import LogprobEntry


class Logprob(Struct, frozen=True):
    """A token's log-probability in the model's own distribution, before temperature, penalties and bias."""

    logprob: float
    rank: int  # 1 is the likeliest token
    decoded_token: str


TokenDistribution = dict[int, Logprob]
"""Log-probabilities at one position, by token id: of the token that stands there, and of the likeliest tokens."""


class CompletionOutput(Struct, frozen=True, kw_only=True):
    """The output of one sample. `token_ids` includes the token that ended it, which `text` leaves out."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # None, like `logprobs`, unless they were requested
    logprobs: list[TokenDistribution] | None
    finish_reason: str | None  # "stop", "length", or "error"
    stop_reason: str | int | None  # the stop string, or the id of `stop_token_ids`, that ended it
    error: str | None = None  # why it could not go on, if the reason is "error"; other outputs are whole all the same


class RequestOutput(Struct, frozen=True, kw_only=True):
    """The output of one prompt. `prompt` is None if it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenDistribution | None] | None  # None at the first token
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # of the prompt, found in the prefix cache


def distribution(entry: LogprobEntry) -> TokenDistribution | None:
    """Return one position's entry as a mapping, or None for the first token of a prompt."""
    if entry.logprob is None:
        return None
    own = Logprob(entry.logprob, entry.rank, entry.token)
    return {entry.id: own} | {other.id: Logprob(other.logprob, other.rank, other.token) for other in entry.top}

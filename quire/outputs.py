"""The results of `LLM`: one `RequestOutput` for each prompt, with one `CompletionOutput` for each sample.

`LLM.beam_search` has other ones, as in vLLM: a `BeamSearchOutput` for each prompt.
"""

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
    finish_reason: str | None  # "stop" or "length"
    stop_reason: str | int | None  # the stop string, or the id of `stop_token_ids`, that ended it


class RequestOutput(Struct, frozen=True, kw_only=True):
    """The output of one prompt. `prompt` is None if it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenDistribution | None] | None  # None at the first token
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # of the prompt, found in the prefix cache


class BeamSearchSequence(Struct, frozen=True, kw_only=True):
    """A beam. `tokens` and `text` begin with the prompt; `tokens` includes the token that ended the beam."""

    tokens: list[int]
    logprobs: list[TokenDistribution]  # at each token of the output, with those that were considered
    cum_logprob: float  # of the output
    text: str
    finish_reason: str  # "stop" or "length"
    stop_reason: int | None  # the token that ended it


class BeamSearchOutput(Struct, frozen=True):
    """The beams of one prompt with the best scores, the best first."""

    sequences: list[BeamSearchSequence]


def distribution(entry: LogprobEntry) -> TokenDistribution | None:
    """Return one position's entry as a mapping, or None for the first token of a prompt."""
    if entry.logprob is None:
        return None
    own = Logprob(entry.logprob, entry.rank, entry.token)
    return {entry.id: own} | {other.id: Logprob(other.logprob, other.rank, other.token) for other in entry.top}

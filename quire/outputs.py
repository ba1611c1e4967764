"""The results of `LLM`: one `RequestOutput` for each prompt, with one `CompletionOutput` for each sample.

They have vLLM's fields. Those about what Quire does not have (encoders, transfers, ...) are always None.

`LLM.beam_search` has other ones, as in vLLM: a `BeamSearchOutput` for each prompt.
"""

from collections.abc import Sequence

from msgspec import Struct

from quire.lora_request import LoRARequest
from shared.text.logprobs import LogprobEntry


class Logprob(Struct, frozen=True):
    """A token's log-probability in the model's own distribution, before temperature, penalties and bias."""

    logprob: float
    rank: int | None  # 1 is the likeliest token; None for those of `logprob_token_ids`
    decoded_token: str | None  # None without `detokenize`


TokenDistribution = dict[int, Logprob]
"""Log-probabilities at one position, by token id: of the token that stands there, and of the likeliest tokens, or of
those that were named.
"""


class CompletionOutput(Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The output of one sample. `token_ids` includes the token that ended it, which `text` leaves out."""

    index: int
    text: str  # empty without `detokenize`
    token_ids: list[int]
    cumulative_logprob: float | None  # None, like `logprobs`, unless they were requested
    logprobs: Sequence[TokenDistribution] | None  # a list, or `FlatLogprobs`
    finish_reason: str | None  # "stop", "length", "repetition" or "error"
    stop_reason: str | int | None  # the stop string, or the id of `stop_token_ids`, that ended it
    error: str | None = None  # why it could not go on, if the reason is "error"; others that have begun are whole
    lora_request: LoRARequest | None = None  # the adapter that it used
    routed_experts: None = None
    sampling_mask: None = None
    spec_decode_metrics: None = None
    weight_versions: None = None

    def finished(self) -> bool:
        """Return whether the sample has ended."""
        return self.finish_reason is not None


class RequestStateStats(Struct, frozen=True, kw_only=True):
    """When things happened to a request. Names that end in `_ts` are seconds of the monotonic clock."""

    num_generation_tokens: int
    arrival_time: float  # in seconds since 1970
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float  # seconds from the arrival to the first token


class RequestOutput(Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The output of one prompt. `prompt` is None if it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[TokenDistribution | None] | None  # None at the first token; {} there in `FlatLogprobs`
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    metrics: RequestStateStats | None = None
    prompt_token_id_logprobs: None = None
    num_cache_creation_tokens: None = None
    lora_request: LoRARequest | None = None  # the adapter that it used
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


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


def distribution(entry: LogprobEntry, *, with_text: bool = True) -> TokenDistribution | None:
    """Return one position's entry as a mapping, or None for the first token of a prompt."""
    if entry.logprob is None:
        return None
    own = Logprob(entry.logprob, entry.rank, entry.token if with_text else None)
    others = (other for other in entry.top if other.id != entry.id)
    return {entry.id: own} | {
        other.id: Logprob(other.logprob, other.rank, other.token if with_text else None) for other in others
    }

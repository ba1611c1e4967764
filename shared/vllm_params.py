"""`VllmParams`: the fields of vLLM's `SamplingParams` that have no effect here, so that its scripts run unchanged.

A script may set them to their defaults, or to what asks for nothing. Any other value is refused by name, except for
hints, which cannot change an output.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct

from shared.errors import InvalidRequest, brief


class RequestOutputKind(Enum):
    """How a stream of vLLM's engine reports an output. `LLM` has no streams, and returns whole outputs, as in vLLM."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "logits_processors": ((), "logits are computed where no code of the user runs; logit_bias changes them"),
    "extra_args": ((), "they are arguments of custom samplers, and there are none"),
    "prompt_logprob_token_ids": ((), "prompt_logprobs has the likeliest tokens"),
    "prompt_logprob_start": ((0,), "prompt_logprobs has all tokens of the prompt"),
    "watermarking": ((), "there are no watermarks"),
    "routed_experts_prompt_start": ((0,), "routed experts are not returned"),
    "trace_decode_token_ids": ((), "tokens are sampled, not replayed"),
}
"""The fields that are refused, with the values besides None, [] and {} that ask for nothing, and the reason."""


class VllmParams(Struct, kw_only=True):
    """Fields of vLLM's `SamplingParams` besides those that are honoured. Raise `InvalidRequest` for what is refused."""

    output_kind: RequestOutputKind | None = None  # a hint
    skip_clone: bool = False  # a hint: the fields will not change, so that no copy is needed
    best_of: int | None = None  # only equal to n
    logits_processors: Sequence[Any] | None = None
    extra_args: Mapping[str, Any] | None = None
    prompt_logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_start: int | None = None
    watermarking: Any = None
    routed_experts_prompt_start: int | None = None
    trace_decode_token_ids: Sequence[int] | None = None

    def check_refused(self) -> None:
        """Raise `InvalidRequest`, naming the field and the reason, for a value that Quire cannot honour."""
        if not isinstance(self.output_kind, RequestOutputKind | None):
            raise InvalidRequest(
                f"output_kind must be a RequestOutputKind, got {brief(self.output_kind)}", "output_kind"
            )
        for name, (neutral_values, reason) in REFUSED.items():
            value = getattr(self, name)
            if not asks_for_nothing(value, neutral_values):
                raise InvalidRequest(f"{name} is not supported: {reason}; got {brief(value)}", name)


def asks_for_nothing(value: Any, neutral_values: tuple[Any, ...]) -> bool:
    """Return whether a value has no effect: None, what is empty, and `neutral_values`. False is no 0, as in JSON."""
    if value is None or (isinstance(value, (Sequence, Mapping)) and not value):
        return True
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in neutral_values)

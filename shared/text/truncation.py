"""`Truncation`: the part of a prompt that is kept, if the user asks for that. Otherwise a long prompt is refused."""

from typing import Any

from msgspec import Struct

from shared.errors import InvalidRequest, brief
from shared.params import whole

SIDES = ("left", "right")
"""Where tokens are dropped."""


class Truncation(Struct, frozen=True):
    """The last tokens of a prompt, or its first ones if `keep_start`."""

    max_tokens: int
    keep_start: bool

    @classmethod
    def of(
        cls,
        length: Any,
        side: Any,
        *,
        max_tokens: int | None,
        max_model_len: int,
        default_max_tokens: int | None = None,
    ) -> "Truncation | None":
        """Return what `truncate_prompt_tokens` and `truncation_side` ask for; None: the prompt is kept whole.

        -1 keeps what leaves room for `max_tokens` of output, or else for the default, or for one token. Raise
        `InvalidRequest`, naming the field, for a value of a wrong type or range.
        """
        if side is not None and side not in SIDES:
            raise InvalidRequest(f"truncation_side must be left or right, got {brief(side)}", "truncation_side")
        if length is None:
            return None
        length = whole("truncate_prompt_tokens", length)
        num_output = 1 if max_tokens is None else max_tokens
        if length == -1 and max_tokens is None and default_max_tokens and default_max_tokens < max_model_len:
            num_output = default_max_tokens
        limit = max_model_len - num_output
        if limit < 1:
            raise InvalidRequest(
                f"the context of this model is {max_model_len} tokens, and max_tokens is {brief(num_output)}, which "
                "leaves no room for a prompt",
                "max_tokens",
            )
        if length != -1 and not 1 <= length <= limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or between 1 and {limit}, which is the context of {max_model_len} "
                f"tokens without max_tokens, got {brief(length)}",
                "truncate_prompt_tokens",
            )
        return cls(limit if length == -1 else length, side == "right")

    def cut(self, ids: list[int]) -> list[int]:
        """Return the part of a prompt that is kept."""
        return ids[: self.max_tokens] if self.keep_start else ids[-self.max_tokens :]

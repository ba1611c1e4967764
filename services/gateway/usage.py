"""The `usage` object: tokens of a whole answer. Each prompt counts once, whatever its number of samples."""

from collections.abc import Sequence
from typing import Any

from services.gateway.generation import Generation


def usage(generations: Sequence[Generation], output: int | None = None) -> dict[str, Any]:
    """Return the usage of what was generated so far; with `output` tokens instead where fewer have been sent.

    Stop and end-of-sequence tokens are counted, since they were generated.
    """
    prompt = sum(len(generation.job.tokens) for generation in generations)
    if output is None:
        output = sum(generation.output_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(generation.cached_tokens for generation in generations)},
    }

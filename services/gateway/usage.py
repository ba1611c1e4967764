"""The `usage` object: tokens of a whole answer. Each prompt counts once, whatever its number of samples."""

from collections.abc import Sequence
from typing import Any

from services.gateway.generation import Generation


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Of what was generated so far. Stop and end-of-sequence tokens are counted, since they were generated."""
    prompt = sum(len(generation.job.tokens) for generation in generations)
    output = sum(generation.output_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(generation.cached_tokens for generation in generations)},
    }

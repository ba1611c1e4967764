"""The `usage` object: tokens of a whole answer. Each prompt counts once, whatever its number of samples."""

from collections.abc import Sequence
from typing import Any

from services.gateway.generation import Generation


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the usage of what was generated so far, stop and end-of-sequence tokens included."""
    return _usage(
        sum(len(generation.job.tokens) for generation in generations),
        sum(generation.output_tokens for generation in generations),
        sum(generation.cached_tokens for generation in generations),
    )


class SentUsage:
    """The usage of what a stream has sent so far. It keeps sums: there may be a thousand prompts, each with chunks."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._prompt = sum(len(generation.job.tokens) for generation in generations)
        self._output, self._cached = _Total(), _Total()

    def note_output(self, choice: int, tokens: int) -> None:
        """Note that so many tokens of a choice have been sent in all."""
        self._output.set(choice, tokens)

    def note_cached(self, prompt: int, tokens: int) -> None:
        """Note that so many tokens of a prompt were found in the prefix index."""
        self._cached.set(prompt, tokens)

    def now(self) -> dict[str, Any]:
        """Return the usage so far."""
        return _usage(self._prompt, self._output.sum, self._cached.sum)


class _Total:
    """The sum of each key's last value."""

    def __init__(self) -> None:
        self.sum = 0
        self._last: dict[int, int] = {}

    def set(self, key: int, value: int) -> None:
        self.sum += value - self._last.get(key, 0)
        self._last[key] = value


def _usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }

"""A model for tests of beam search: a distribution of the next token that depends on all tokens before it."""

import math
import random
from collections.abc import Sequence

from shared.protocol import TokenLogprobs


class ToyModel:
    """Draws the distribution after a sequence from a generator that is seeded with the sequence."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self._seed = seed

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of the vocabulary after `tokens`."""
        rng = random.Random(f"{self._seed} {list(tokens)}")
        logits = [2 * rng.gauss() for _ in range(self.vocab_size)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    def distribution(self, tokens: Sequence[int], count: int) -> TokenLogprobs:
        """Return the likeliest token after `tokens`, with the `count` likeliest ones as its alternatives."""
        logprobs = self.logprobs(tokens)
        top = sorted(range(self.vocab_size), key=lambda token: -logprobs[token])
        return TokenLogprobs(logprobs[top[0]], 1, top[:count], [logprobs[token] for token in top[:count]])

"""`BeamSearch`: which sequences a beam search keeps and returns. It is pure.

In each step every running beam is extended by each of its likeliest tokens, and the `width` extensions with the highest
sums of log-probabilities run on. One that ends with a stop token, and is among the first `width` of all extensions, is
finished, and so are the first `width` of the last step. The result is the `width` finished ones with the best scores:

    score = sum of log-probabilities / (number of output tokens, the stop token included) ** length_penalty

These are the rules of transformers' `generate` with `early_stopping="never"`: the search ends at `max_tokens`, or once
no running beam can come into the result, and never because there are enough finished ones.
"""

import heapq
from collections.abc import Iterator, Sequence

from msgspec import Struct

from shared.beam_params import BeamSettings
from shared.protocol import FinishReason, Sampling, TokenLogprobs


class Beam:
    """A sequence of output tokens: that of `parent`, and one token more. The first beam has no token."""

    __slots__ = ("cum_logprob", "length", "logprobs", "parent", "token")

    def __init__(
        self, parent: "Beam | None", token: int, cum_logprob: float, logprobs: TokenLogprobs | None = None
    ) -> None:
        """`cum_logprob` is the sum of all tokens' log-probabilities, `logprobs` those of `token` if they are wanted."""
        self.parent, self.token, self.cum_logprob, self.logprobs = parent, token, cum_logprob, logprobs
        self.length: int = parent.length + 1 if parent else 0

    @property
    def path(self) -> "list[Beam]":
        """Return the beams that this one grew from, and itself: one for each token."""
        path, beam = [], self
        while beam.parent is not None:
            path.append(beam)
            beam = beam.parent
        return path[::-1]

    @property
    def tokens(self) -> list[int]:
        return [beam.token for beam in self.path]

    @property
    def all_logprobs(self) -> list[TokenLogprobs] | None:
        """Return `logprobs` of each token, or None if they are not wanted."""
        return [beam.logprobs for beam in self.path if beam.logprobs is not None] or None

    def extensions(self, distribution: TokenLogprobs, num_logprobs: int) -> "Iterator[Beam]":
        """Yield the beam with each of the likeliest next tokens, the likeliest first.

        They keep `num_logprobs` alternatives of the token; -1: no log-probabilities at all.
        """
        ids, values = distribution.top_ids, distribution.top_logprobs
        for rank, (token, logprob) in enumerate(zip(ids, values, strict=True), start=1):
            logprobs = None
            if num_logprobs >= 0:
                logprobs = TokenLogprobs(logprob, rank, ids[:num_logprobs], values[:num_logprobs])
            yield Beam(self, token, self.cum_logprob + logprob, logprobs)

    def __repr__(self) -> str:
        return f"<Beam {self.tokens} {self.cum_logprob:.4f}>"


class FinishedBeam(Struct, frozen=True, eq=False):
    """A beam that does not go on."""

    beam: Beam
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """A search from one prompt. Call `advance` until `running` is empty; then `finished` is the result, best first.

    `sampling` has the limits, the stop tokens and the number of alternatives that beams keep of each token; what else
    is in it has no effect.
    """

    def __init__(self, settings: BeamSettings, sampling: Sampling) -> None:
        self.running = [Beam(None, -1, 0.0)]  # all of one length, the likeliest first
        self.finished: list[FinishedBeam] = []
        self._settings = settings
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_token_ids)

    def advance(self, distributions: Sequence[TokenLogprobs]) -> None:
        """Take a step. There is one distribution of the next token for each running beam, in their order.

        It has the likeliest tokens, `BeamSettings.num_candidates` at least.
        """
        width, length = self._settings.width, self.running[0].length + 1
        is_last = length == self._sampling.max_tokens
        former, self.running = self.running, []
        for rank, beam in enumerate(self._candidates(former, distributions)):
            stops = beam.token in self._stop_ids
            if not (stops or is_last):
                self.running.append(beam)
            elif rank < width:
                self._finish(beam, FinishReason.STOP if stops else FinishReason.LENGTH)
            if len(self.running) == width or (is_last and rank == width - 1):
                break
        if not self._can_improve():
            self.running = []

    def _candidates(self, beams: Sequence[Beam], distributions: Sequence[TokenLogprobs]) -> Iterator[Beam]:
        """Yield the extensions of all beams that are allowed, the likeliest first."""
        count = self._sampling.logprobs
        extensions = [beam.extensions(one, count) for beam, one in zip(beams, distributions, strict=True)]
        too_short = beams[0].length < self._sampling.min_tokens  # to end with a stop token
        for beam in heapq.merge(*extensions, key=lambda beam: -beam.cum_logprob):
            if not (too_short and beam.token in self._stop_ids):
                yield beam

    def _finish(self, beam: Beam, reason: FinishReason) -> None:
        self.finished.append(FinishedBeam(beam, self._score(beam, beam.length), reason))
        self.finished.sort(key=lambda finished: -finished.score)
        del self.finished[self._settings.width :]

    def _can_improve(self) -> bool:
        """Return whether a running beam may still come into the result.

        Its sum can only fall. So its score is at most that of the present sum at the length that favours it most.
        """
        if not self.running or len(self.finished) < self._settings.width:
            return bool(self.running)
        likeliest = self.running[0]
        favours_long = self._settings.length_penalty > 0
        best_length = self._sampling.max_tokens if favours_long else likeliest.length
        return self._score(likeliest, best_length) > self.finished[-1].score

    def _score(self, beam: Beam, length: int) -> float:
        divisor: float = length**self._settings.length_penalty
        return beam.cum_logprob / divisor

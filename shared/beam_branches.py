"""`BeamBranches`: a beam search as sequences at an engine. The gateway and `quire.LLM` submit them.

A `Branch` is a sequence that begins with the tokens of a beam, goes on by its likeliest tokens and reports the other
likely ones at each. While the search agrees with its tokens, it runs on. A beam that takes another token gets a branch
of its own, whose tokens so far the engine finds in its prefix cache, but for less than a block. So a beam search needs
nothing of an engine that other requests do not, and what lets those outlive an engine works for it as well.
"""

from collections import deque

from msgspec import Struct

from shared.beam_params import BeamSettings
from shared.beam_search import Beam, BeamSearch
from shared.protocol import ProgressRow, Sampling, TokenLogprobs

LOOKAHEAD = 16
"""Tokens that a branch computes before it is submitted again, if it still runs: it may be ahead of the others by as
many, which are wasted if the search wants none of them."""


class Branch:
    """A sequence at an engine for one beam, and its tokens that the search has not used yet."""

    __slots__ = ("_steps", "beam", "ended")

    def __init__(self, beam: Beam) -> None:
        self.beam = beam  # that needs the next step
        self.ended = False  # nothing more comes from the engine
        self._steps: deque[tuple[int, TokenLogprobs]] = deque()  # tokens, and the distributions that they are from

    @property
    def has_step(self) -> bool:
        return bool(self._steps)

    def add(self, row: ProgressRow) -> None:
        """Keep the new tokens of a row, which has log-probabilities."""
        self._steps.extend(zip(row.tokens, row.logprobs or (), strict=True))
        self.ended = row.finish_reason is not None

    def take_step(self) -> tuple[int, TokenLogprobs]:
        """Return the oldest unused token, and the distribution that it is from."""
        return self._steps.popleft()

    def continues_as(self, beam: Beam, token: int) -> bool:
        """Return whether `beam` goes on by the branch's own last used token, and more comes or has come after it."""
        return beam.token == token and (self.has_step or not self.ended)


class BranchChanges(Struct, frozen=True):
    """What a step of the search changes."""

    started: list[tuple[Branch, Branch]]  # to be submitted, each with the one whose tokens it begins with
    dropped: list[Branch]  # to be aborted, unless they have ended


class BeamBranches:
    """The branches of a search, one for each running beam. At first there is one, which is to be submitted.

    Let each branch `add` its rows until all have a step, then `advance`, as long as there are branches.
    """

    def __init__(self, settings: BeamSettings, sampling: Sampling) -> None:
        """`sampling` is the user's, with the log-probabilities that are wanted."""
        self.search = BeamSearch(settings, sampling)
        self.branches = [Branch(beam) for beam in self.search.running]
        self._sampling = sampling
        self._num_logprobs = max(settings.num_candidates(sampling), sampling.logprobs)

    def sampling(self, branch: Branch) -> Sampling:
        """Return the parameters by which an engine computes a branch. The first one also scores the prompt."""
        beam = branch.beam
        return Sampling(
            max_tokens=min(beam.length + LOOKAHEAD, self._sampling.max_tokens),
            seed=0,
            temperature=0.0,
            logprobs=self._num_logprobs,
            prompt_logprobs=-1 if beam.parent else self._sampling.prompt_logprobs,
        )

    def advance(self) -> BranchChanges:
        """Take a step of the search."""
        former = {id(branch.beam): (branch, *branch.take_step()) for branch in self.branches}
        self.search.advance([distribution for _, _, distribution in former.values()])
        self.branches, started = [], []
        for beam in self.search.running:
            branch, token, _ = former[id(beam.parent)]
            if branch.continues_as(beam, token):
                branch.beam = beam
            else:
                branch, origin = Branch(beam), branch
                started.append((branch, origin))
            self.branches.append(branch)
        dropped = [branch for branch, _, _ in former.values() if branch not in self.branches]
        return BranchChanges(started, dropped)

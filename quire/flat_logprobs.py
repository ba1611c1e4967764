"""`FlatLogprobs`: log-probabilities of many positions in a few lists instead of an object for each alternative.

Python's garbage collector has less to look at, which shows with many long outputs. `SamplingParams.flat_logprobs` asks
for it. The names are vLLM's.
"""

from collections.abc import Iterable, Sequence
from typing import overload

from quire.outputs import Logprob, TokenDistribution


class FlatLogprobs(Sequence[TokenDistribution]):
    """Behaves like a list with a mapping for each position, which is made when it is read.

    The alternatives of position i are in the other lists, from `start_indices[i]` up to `end_indices[i]`, which is not
    one of them. The first token of a prompt has none.
    """

    def __init__(self, distributions: Iterable[TokenDistribution | None] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        for distribution in distributions:
            self.append(distribution)

    def append(self, distribution: TokenDistribution | None) -> None:
        """Add the next position."""
        self.start_indices.append(len(self.token_ids))
        for token, logprob in (distribution or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(logprob.logprob)
            self.ranks.append(logprob.rank)
            self.decoded_tokens.append(logprob.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> TokenDistribution: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> "TokenDistribution | FlatLogprobs":
        if isinstance(index, slice):
            return FlatLogprobs(self[at] for at in range(*index.indices(len(self))))
        alternatives = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            for at in alternatives
        }

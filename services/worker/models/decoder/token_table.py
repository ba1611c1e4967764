"""`TokenTable`: the embedding or the output layer, which has a row for each token of the vocabulary."""

import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from services.worker.models.decoder.layers import Weights
from services.worker.models.share import Share
from services.worker.rank_group import RankGroup


class TokenTable:
    """A rank's rows of the table, as `share` says, and the operations that need all of them."""

    def __init__(self, weights: Weights, name: str, share: Share, group: RankGroup, ops: Ops) -> None:
        self._table = ops.pack_linear(weights.load_matrix(name))
        self._rows, self._padded_rows, self._vocab_size = share.vocabulary, share.padded_rows, share.spec.vocab_size
        self._group, self._ops = group, ops

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the rows (T, H) of tokens. Ranks give zeros for rows that they do not have."""
        if len(self._rows) == self._vocab_size:
            return self._ops.embedding(tokens, self._table)
        is_elsewhere = (tokens < self._rows.start) | (tokens >= self._rows.stop)
        own = (tokens - self._rows.start).masked_fill_(is_elsewhere, 0)
        x = self._ops.embedding(own, self._table).masked_fill_(is_elsewhere[:, None], 0)
        return self._group.all_reduce(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (N, V) float32 of hidden states (N, H)."""
        logits = self._ops.logits(hidden, self._table)
        if len(self._rows) == self._vocab_size:
            return logits
        if missing := self._padded_rows - len(self._rows):
            logits = F.pad(logits, (0, missing))  # ranks exchange equal parts
        return self._group.all_gather(logits)[:, : self._vocab_size].contiguous()

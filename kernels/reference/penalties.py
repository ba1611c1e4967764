"""Repetition, presence and frequency penalties.

for each token in prompt or output:  x ← x / repetition if x > 0 else x * repetition
for each token in the output:        x ← x - frequency * (times in the output) - presence
"""

import torch
from torch import Tensor


def penalties(
    logits: Tensor,
    tokens: Tensor,
    prompt_lens: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """A new (S, V) from `logits` (S, V).

    `tokens` (S, L) int: row r's first `lengths[r]` entries are its tokens, of which `prompt_lens[r]` ≥ 1 the prompt;
    what lies behind may be anything. The penalties are (S,) of the logits' dtype.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    known = positions < lengths[:, None]
    ids = torch.where(known, tokens, tokens[:, :1]).long()  # the padding repeats a token that is there anyway
    in_output = (known & (positions >= prompt_lens[:, None])).int()
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device).scatter_add_(1, ids, in_output)
    count = counts.gather(1, ids)
    x = logits.gather(1, ids)
    x = torch.where(x > 0, x / repetition[:, None], x * repetition[:, None])
    x = x - frequency[:, None] * count - presence[:, None] * (count > 0)
    return logits.scatter(1, ids, x)  # a token's several entries all carry the same value

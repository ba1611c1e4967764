"""Which experts a token uses, and what each one's share is.

The k largest of softmax(logits), optionally divided by their sum.
"""

import torch
from torch import Tensor


def route(logits: Tensor, top_k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Shares (T, K) float32 and experts (T, K) int64, largest share first. `logits` (T, E)."""
    shares, chosen = torch.softmax(logits.float(), -1).topk(top_k, dim=-1)
    return (shares / shares.sum(-1, keepdim=True) if normalised else shares), chosen

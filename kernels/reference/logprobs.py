"""log p(token) = x[token] - log Σ exp(x), the token's rank, and the likeliest tokens."""

import torch
from torch import Tensor

from kernels.reference.top_k import top_k

FLOOR = -9999.0
"""Reported in place of anything lower, -inf included, which JSON cannot say."""


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability (S,) and rank (S,) of `tokens` (S,), ids (S, k) and log-probabilities (S, k) of the k best.

    `logits` (S, V) float32. The likeliest token has rank 1; equal ones rank in the order of their ids, as in the list.
    """
    total = logits.logsumexp(-1, keepdim=True)
    x = logits.gather(-1, tokens[:, None])
    lower_ids = torch.arange(logits.shape[-1], device=logits.device) < tokens[:, None]
    rank = 1 + (logits > x).sum(-1) + ((logits == x) & lower_ids).sum(-1)
    values, ids = top_k(logits, k)
    return _floor(x - total)[:, 0], rank, ids, _floor(values - total)


def _floor(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=FLOOR, neginf=FLOOR).clamp_(min=FLOOR)

"""y[t] = Σ_k shares[t, k] * experts[chosen[t, k]](x[t]), summed in float32 in the order of k.

Tokens are grouped by expert, so that each expert in use runs once, on all of its tokens. An expert must compute each
row by itself; the sum of a row then depends on that row alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def mix_experts(x: Tensor, shares: Tensor, chosen: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """`x` (T, H), `shares` (T, K) float32, `chosen` (T, K) int64; an expert takes (N, H) to (N, H). Gives (T, H)."""
    count, used = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    sizes = chosen.flatten().bincount(minlength=len(experts)).tolist()
    groups = zip(experts, torch.split(x[order // used], sizes), strict=True)
    parts = torch.cat([expert(rows) for expert, rows in groups if len(rows)])
    y = torch.empty_like(parts)
    y[order] = parts
    terms = y.view(count, used, -1) * shares[..., None]
    total = terms[:, 0]
    for term in terms.unbind(1)[1:]:
        total = total + term
    return total.to(x.dtype)

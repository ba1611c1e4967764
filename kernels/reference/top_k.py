"""The k best of each row, best first, ties in the order of ids."""

import torch
from torch import Tensor


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values (S, k) and ids (S, k) int64 of the k largest in each row of `x` (S, V) float32, k ≤ V.

    Torch's own topk leaves open which of several equal entries it takes and in what order it gives them. The order is
    mended by two sorts of the k entries; where a tie crosses the k-th place, the row is taken again by exact keys.
    """
    if k == x.shape[-1]:
        return x.sort(dim=-1, descending=True, stable=True)
    values, ids = torch.topk(x, k, dim=-1)
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    if k:
        crossing = (x >= values[:, -1:]).sum(-1) > k
        if bool(crossing.any()):
            ids[crossing] = _by_keys(x[crossing], k)
            values = x.gather(-1, ids)
    return values, ids


def _by_keys(x: Tensor, k: int) -> Tensor:
    """Ids of the k largest, by int64 keys that are all different: the value's order above, the reversed id below."""
    bits = (x + 0.0).view(torch.int32).long()  # adding makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, ~bits - 2**31, bits)  # integers in the order of the floats
    ids = torch.arange(x.shape[-1], device=x.device)
    return torch.topk((ordered << 32) - ids, k, dim=-1).indices

"""Mixtures of experts: the choice of a token's experts, and the weighted sum of their outputs."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kernels.decoder_layers import Expert


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return the k largest of softmax(logits), divided by their sum if `renormalize`, and their experts."""
    weights, ids = torch.softmax(logits.float(), -1).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids


def pack_experts(experts: Iterable[Expert], count: int) -> list[Callable[[Tensor], Tensor]]:
    """Return the experts' functions."""
    return [expert.forward for expert in experts]


def mix_experts(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """y[t] = Σ_k topk_weights[t, k] * experts[topk_ids[t, k]](x[t]), summed in float32 in the order of k.

    Tokens are grouped by expert, so that each expert in use runs once, on all of its tokens. An expert must compute
    each row by itself; the sum of a row then depends on that row alone.
    """
    count, used = topk_ids.shape
    order = topk_ids.flatten().argsort(stable=True)
    sizes = topk_ids.flatten().bincount(minlength=len(experts)).tolist()
    groups = zip(experts, torch.split(x[order // used], sizes), strict=True)
    parts = torch.cat([expert(rows) for expert, rows in groups if len(rows)])
    y = torch.empty_like(parts)
    y[order] = parts
    terms = y.view(count, used, -1) * topk_weights[..., None]
    total = terms[:, 0]
    for term in terms.unbind(1)[1:]:
        total = total + term
    return total.to(x.dtype)

"""z = (x - max(x)) / temperature: the scaled logits, shifted so that the likeliest is at 0."""

import torch
from torch import Tensor


def temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """`logits` (S, V), `temperatures` (S,) > 0; gives a new (S, V).

    Subtracting first keeps small temperatures from overflow: what leaves the range is -inf, which is right.
    """
    peak = logits.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)  # a row with no token left stays -inf instead of NaN
    return (logits - peak).div_(temperatures[:, None])

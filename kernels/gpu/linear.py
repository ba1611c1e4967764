"""Matrix products with weights, and the rows of weights: torch's, which are the vendor's.

Bytes moved, for N rows and a weight (out, in) of s bytes an element: (out in + N (in + out)) s, and 2 N in out
operations; up to some 180 rows of two-byte types an H200 spends more time on the weight's bytes than on the products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """y = x Wᵀ in float32, as the product has summed it: rounded to two bytes, many likely tokens would be equal."""
    if x.dtype == torch.float32 or x.device.type == "cpu":  # torch has no such product of CPU tensors
        return F.linear(x, weight).float()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)

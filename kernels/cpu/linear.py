"""y = x Wᵀ + b by oneDNN, with the weight laid out once for its kernels.

Beside being faster for few rows, a packed weight makes a row's bits independent of the batch: oneDNN's blocking of a
packed weight follows from the weight, and its sums run over the inputs in one order. The exception is a single row,
which goes to a matrix-vector routine of its own; so a single row is computed as two. That this holds is tested for
numbers of rows, neighbours and threads; the plain product differs between most numbers of rows.
"""

import torch
from torch import Tensor


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for `dtype` on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def pack_linear(weight: Tensor) -> Tensor:
    """`weight` (out, in) in oneDNN's layout, or as it is where oneDNN has no kernels for its dtype."""
    if not packs(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the reference, with a `weight` that `pack_linear` gave."""
    if not weight.is_mkldnn:
        return torch.nn.functional.linear(x, weight, bias)
    single = len(x) == 1
    rows = torch.cat((x, x)) if single else x.contiguous()
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return y[:1] if single else y

"""The tolerance between two implementations of an operation: by dtype, growing with the length that is summed over."""

import math

import torch
from torch import Tensor

RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype, reduced: int = 1) -> None:
    """`expected` may be of higher precision than `got`, whose arithmetic was in `dtype`."""
    assert got.shape == expected.shape
    assert torch.isfinite(got).all()
    rtol = RELATIVE[dtype] * math.sqrt(reduced)
    torch.testing.assert_close(got.double(), expected.double(), rtol=rtol, atol=rtol)

"""How far two runs of one sequence must be alike.

On the compiled kernels a row's bits depend on itself alone, in float32 and in few bits: there, tokens and
log-probabilities must be equal to the last bit. Where the reference kernels serve, the margin rule holds instead.
"""

from collections.abc import Sequence

import torch

from kernels.load import ops
from tests.exactness.margin_rule import Run, assert_same, compare

EXACT = ops(torch.device("cpu")).mixes_types


def differ(undisturbed: Run, other: Run, vocab_size: int) -> bool:
    """Whether `other` is not what it must be."""
    return undisturbed != other if EXACT else bool(compare(undisturbed, other, vocab_size).fault)


def assert_alike(undisturbed: Sequence[Run], others: Sequence[Run], vocab_size: int) -> None:
    """Each of `others` is what it must be, beside the undisturbed run of the same sequence."""
    if not EXACT:
        assert_same(undisturbed, others, vocab_size)
        return
    unlike = [index for index, (run, other) in enumerate(zip(undisturbed, others, strict=True)) if run != other]
    assert not unlike, {index: compare(undisturbed[index], others[index], vocab_size) for index in unlike}

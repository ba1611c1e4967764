"""Compares two runs of one sequence: to the last bit, or by the margin rule.

On the compiled kernels a row's bits depend on that row alone, with float32 and with quantised weights: tokens and
log-probabilities must be equal to the last bit. On the reference kernels the margin rule (margin_rule.py) applies.
"""

from collections.abc import Sequence

from kernels.cpu import extension
from tests.exactness.margin_rule import Run, assert_same, compare

EXACT = extension.load() is not None


def differ(undisturbed: Run, other: Run, vocab_size: int) -> bool:
    """Return whether `other` differs from the undisturbed run more than it may."""
    return undisturbed != other if EXACT else bool(compare(undisturbed, other, vocab_size).difference)


def assert_alike(undisturbed: Sequence[Run], others: Sequence[Run], vocab_size: int) -> None:
    """Fail unless each of `others` equals the undisturbed run of the same sequence, as far as it must."""
    if not EXACT:
        assert_same(undisturbed, others, vocab_size)
        return
    unlike = [index for index, (run, other) in enumerate(zip(undisturbed, others, strict=True)) if run != other]
    assert not unlike, {index: compare(undisturbed[index], others[index], vocab_size) for index in unlike}

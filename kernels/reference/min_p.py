"""Keep the tokens whose probability is at least `min_p` times the likeliest's."""

from torch import Tensor


def min_p(z: Tensor, thresholds: Tensor) -> Tensor:
    """`z` (S, V) with each row's maximum at 0, `thresholds` (S,) in [0, 1]; gives a new (S, V), -inf where dropped.

    p / p_max = exp(z), so that no softmax is needed.
    """
    lowest = thresholds.double().log().float()  # the same bits whosever logarithm it is
    return z.masked_fill(z < lowest[:, None], -float("inf"))

"""`KVBias`: the biases that a cache of keys and values leaves out, since they are the same for all tokens.

An int8 vector has steps of a 127th of its largest number, and the steps of float8_e4m3fn are up to a 14th of it. With a
bias of 300, one step is larger than the differences between tokens. So keys and values are stored without their bias,
and attention adds it back in float32.
"""

from typing import NamedTuple

from torch import Tensor


class KVBias(NamedTuple):
    """The biases that are left out, each (kv_head, D) float32; None: nothing is left out."""

    keys: Tensor | None = None  # before rotation
    values: Tensor | None = None

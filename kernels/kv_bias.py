"""`KVBias`: the biases that a cache of keys and values leaves out, since they are the same for all tokens.

The quants of an eight-bit vector are multiples of a 127th of its largest number. With a bias of 300 that is more than
all that tells one token from another, so keys and values are stored without it and attention adds it back, in float32.
"""

from typing import NamedTuple

from torch import Tensor


class KVBias(NamedTuple):
    """The biases that are left out, each (kv_head, D) float32, or None where nothing is."""

    keys: Tensor | None = None  # before rotation
    values: Tensor | None = None

"""What a decoder's layers are made of, for kernels that compute them all in one call.

A layer is x + f(norm(x)) twice, with attention and a feed-forward block for f, root-mean-square norms without bias, and
one more norm behind f where there are post norms.
"""

from typing import Any, NamedTuple

from torch import Tensor

from kernels.kv_bias import KVBias

Projection = tuple[Any, Tensor | None]  # what `pack_linear` gave, and the bias


class Sizes(NamedTuple):
    """What all layers share."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float  # of attention scores; 0: none
    eps: float
    activation: str  # the operation's name


class LayerParts(NamedTuple):
    """One layer's weights, packed, and what else is its own."""

    attention_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Projection
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    up: Projection  # gate and up, where the activation is gated
    down: Projection
    mlp_post_norm: Tensor | None
    inner: int  # inputs of `down`
    window: int  # 0: none
    rope: int | None  # which of the model's ropes
    kv_bias: KVBias = KVBias()

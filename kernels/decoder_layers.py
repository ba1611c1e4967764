"""A decoder's layers as values, for kernels that compute all layers in one call, or all experts of one layer.

A layer computes x + f(norm(x)) twice: f is attention, then a feed-forward block. Norms are root-mean-square norms
without bias. With post norms, another norm follows f. The C++ code reads the fields by name: a new field must be
added here and to the struct in kernels/cpu/csrc/decoder_layers.cpp.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from kernels.kv_bias import KVBias
from kernels.lora import LoraStack


class Projection(NamedTuple):
    """A weight as `pack_linear` returned it, and the bias (out,)."""

    weight: Any
    bias: Tensor | None


class Expert(NamedTuple):
    """An expert of a layer's mixture: down(activation(up(x)))."""

    up: Projection  # gate and up, where the activation is gated
    down: Projection
    activation: str  # the operation's name
    forward: Callable[[Tensor], Tensor]  # maps (N, H) to (N, H), every row by itself


class LayerConfig(NamedTuple):
    """The numbers that all layers of a decoder share."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of attention scores
    softcap: float  # of attention scores; 0: none
    eps: float  # of the norms
    activation: str  # the operation's name


class DecoderLayer(NamedTuple):
    """A layer: its weights, as `pack_linear` and `pack_vector` returned them, and the numbers that differ by layer."""

    attention_norm: Tensor  # (H,)
    qkv: Projection
    q_norm: Tensor | None  # (head_dim,)
    k_norm: Tensor | None  # (head_dim,)
    out: Projection
    attention_post_norm: Tensor | None  # (H,)
    mlp_norm: Tensor  # (H,)
    up: Projection  # gate and up if the activation is gated
    down: Projection
    mlp_post_norm: Tensor | None  # (H,)
    window: int  # positions that a query sees; 0: all
    rope: int | None  # index into the model's ropes (rotary embeddings); None: no rotation
    kv_bias: KVBias = KVBias()  # what the KV cache leaves out, and attention adds back
    lora: Mapping[str, LoraStack] = {}  # adapters of `qkv`, `out`, `up` and `down`; none if it is empty

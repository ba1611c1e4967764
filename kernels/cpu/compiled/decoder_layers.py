"""All layers of a decoder in one call: csrc/decoder_layers.cpp, which says what that is good for.

The numbers are those of the single operations, to the bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.compiled.attention import AttentionPlan
from kernels.cpu.compiled.linear import PackedLinear, PackedQuantized
from kernels.decoder_layers import LayerParts, Sizes

GATED = {"silu_and_mul": True, "gelu_tanh_and_mul": True, "gelu_tanh": False}
PANEL = 32  # outputs of the first product of a feed-forward block that become one group of inputs of the second

Caches = Sequence[tuple[Tensor, Tensor]]
Rotations = Sequence[tuple[Tensor, Tensor]]
Layers = Callable[[Tensor, Caches, Tensor, AttentionPlan, Rotations, Sequence[Tensor]], Tensor]


def join_layers(sizes: Sizes, layers: Sequence[LayerParts]) -> Layers | None:
    """The layers as one operation, or None if they are not of a kind that it takes.

    It maps embeddings (T, H), the caches of each layer, the tokens' slots (T,), the batch's plan and, for each rope,
    cosines and sines (T, R), to hidden states (T, H). Last come the packed angles of each rope, or
    nothing if no keys lack a bias.
    """
    if sizes.activation not in GATED or not all(_is_taken(layer) for layer in layers):
        return None
    joined = torch.classes.quire.DecoderLayers(
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        sizes.scale,
        sizes.softcap,
        sizes.eps,
        sizes.activation.startswith("gelu"),
        GATED[sizes.activation],
    )
    for layer in layers:
        joined.add(
            layer.attention_norm,
            _projection(*layer.qkv),
            layer.q_norm,
            layer.k_norm,
            _projection(*layer.out),
            layer.attention_post_norm,
            layer.mlp_norm,
            _projection(*layer.up),
            _projection(*layer.down),
            layer.mlp_post_norm,
            *layer.kv_bias,
            layer.window,
            -1 if layer.rope is None else layer.rope,
        )

    def forward(
        x: Tensor,
        caches: Caches,
        slots: Tensor,
        plan: AttentionPlan,
        rotations: Rotations,
        angles: Sequence[Tensor] = (),
    ) -> Tensor:
        keys, values = zip(*caches, strict=True)
        cos, sin = [c for c, _ in rotations], [s for _, s in rotations]
        hidden: Tensor = joined.forward(x, keys, values, slots, *plan, cos, sin, list(angles))
        return hidden

    return forward


def _is_taken(layer: LayerParts) -> bool:
    weights = [weight for weight, _ in (layer.qkv, layer.out, layer.up, layer.down)]
    return layer.inner % PANEL == 0 and all(isinstance(weight, PackedLinear | PackedQuantized) for weight in weights)


def _projection(weight: PackedLinear | PackedQuantized, bias: Tensor | None) -> Any:
    if isinstance(weight, PackedQuantized):
        return torch.classes.quire.Projection(weight.records, weight.outputs, *weight.kind, bias)
    return torch.classes.quire.Projection(weight.panels, weight.outputs, 0, False, 0, bias)

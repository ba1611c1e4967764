"""The operations in plain torch, as one namespace: mypy checks it against `kernels.ops.Ops`."""

from collections.abc import Sequence

import torch

from kernels.decoder_layers import DecoderLayer, LayerConfig
from kernels.reference.attention import pack_angles, paged_attention, plan_attention
from kernels.reference.cache import copy_blocks, kv_layout, rotate_and_store, swap_in, swap_out, write_kv
from kernels.reference.elementwise import (
    add_layer_norm,
    add_rms_norm,
    gelu_tanh,
    gelu_tanh_and_mul,
    layer_norm,
    pack_vector,
    relu,
    rms_norm,
    silu_and_mul,
)
from kernels.reference.experts import mix_experts, pack_experts, route
from kernels.reference.linear import embedding, linear, logits, pack_linear
from kernels.reference.lora import lora_expand, lora_shrink, new_lora, pack_lora
from kernels.reference.prepare import copy_segments, prepare_inputs
from kernels.reference.sampling import logprobs, pack_metadata, penalties, sample

# Caches of float8_e4m3fn work too, but only as the measure of the GPU's: int8 is as small and more exact.
kv_cache_dtypes = frozenset({torch.int8})
supports_graphs = False
quantized_weights = False


def fuse_layers(config: LayerConfig, layers: Sequence[DecoderLayer]) -> None:
    """Return None: the reference has no fused layers."""

"""The operations of the CPU, as one namespace: mypy checks it against `kernels.ops.Ops`.

Operations that would not be faster in C++ are the reference's.
"""

import torch

from kernels.cpu.attention import pack_angles, paged_attention, plan_attention
from kernels.cpu.cache import kv_layout, rotate_and_store, write_kv
from kernels.cpu.decoder_layers import fuse_layers
from kernels.cpu.elementwise import (
    add_rms_norm,
    gelu_tanh,
    gelu_tanh_and_mul,
    pack_vector,
    rms_norm,
    silu_and_mul,
)
from kernels.cpu.linear import embedding, linear, logits, pack_linear
from kernels.cpu.lora import lora_expand, lora_shrink, new_lora, pack_lora
from kernels.cpu.prepare import copy_segments, prepare_inputs
from kernels.cpu.sampling import logprobs, penalties, sample
from kernels.reference.cache import copy_blocks, swap_in, swap_out
from kernels.reference.elementwise import add_layer_norm, layer_norm, relu
from kernels.reference.experts import mix_experts, pack_experts, route
from kernels.reference.sampling import pack_metadata

kv_cache_dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int8})
supports_graphs = False
quantized_weights = True

"""The operations of NVIDIA GPUs with `--batch-invariant`: a row's bits depend on that row and its context alone.

Matmuls, attention and experts differ from those in `kernels.gpu.ops`. The other operations are the same: they compute
each row or element by itself, in blocks that follow from widths alone.
"""

from functools import partial

from kernels.gpu import attention, experts
from kernels.gpu.attention import KV_CACHE_DTYPES, pack_angles, paged_attention
from kernels.gpu.cache import copy_blocks, kv_layout, rotate_and_store, write_kv
from kernels.gpu.elementwise import (
    add_layer_norm,
    add_rms_norm,
    gelu_tanh_and_mul,
    layer_norm,
    rms_norm,
    silu_and_mul,
)
from kernels.gpu.experts import pack_experts
from kernels.gpu.linear import linear_batch_invariant as linear
from kernels.gpu.linear import logits_batch_invariant as logits
from kernels.gpu.linear import pack_linear_batch_invariant as pack_linear
from kernels.gpu.lora import lora_expand, lora_shrink
from kernels.gpu.prepare import copy_segments, prepare_inputs
from kernels.gpu.sampling import logprobs, penalties, sample
from kernels.gpu.sampling_parameters import pack_metadata
from kernels.reference.cache import swap_in, swap_out
from kernels.reference.elementwise import gelu_tanh, pack_vector, relu
from kernels.reference.experts import route
from kernels.reference.linear import embedding
from kernels.reference.lora import new_lora, pack_lora
from kernels.reference.ops import fuse_layers

kv_cache_dtypes = KV_CACHE_DTYPES
supports_graphs = True
quantized_weights = False

plan_attention = partial(attention.plan_attention, batch_invariant=True)
mix_experts = partial(experts.mix_experts, batch_invariant=True)

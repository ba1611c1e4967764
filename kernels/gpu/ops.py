"""The operations of NVIDIA GPUs, as one namespace: mypy checks it against `kernels.ops.Ops`.

Operations that are one call of torch's are the reference's, and so are dense matmuls: the vendor's library is faster
than Triton at those.
"""

from kernels.gpu.attention import KV_CACHE_DTYPES, pack_angles, paged_attention, plan_attention
from kernels.gpu.cache import copy_blocks, kv_layout, rotate_and_store, write_kv
from kernels.gpu.elementwise import (
    add_layer_norm,
    add_rms_norm,
    gelu_tanh_and_mul,
    layer_norm,
    rms_norm,
    silu_and_mul,
)
from kernels.gpu.experts import mix_experts, pack_experts
from kernels.gpu.linear import logits
from kernels.gpu.lora import lora_expand, lora_shrink
from kernels.gpu.prepare import copy_segments, prepare_inputs
from kernels.gpu.sampling import logprobs, penalties, sample
from kernels.gpu.sampling_parameters import pack_metadata
from kernels.reference.cache import swap_in, swap_out
from kernels.reference.elementwise import gelu_tanh, pack_vector, relu
from kernels.reference.experts import route
from kernels.reference.linear import embedding, linear, pack_linear
from kernels.reference.lora import new_lora, pack_lora
from kernels.reference.ops import fuse_layers

kv_cache_dtypes = KV_CACHE_DTYPES
supports_graphs = True
quantized_weights = False

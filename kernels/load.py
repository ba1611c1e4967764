"""Which implementation of each operation a device gets. The only place that chooses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import extension
from kernels.cpu.compiled import attention, decoder_layers, elementwise, sampling
from kernels.cpu.compiled import linear as matrix
from kernels.decoder_layers import LayerParts, Sizes
from kernels.layout import KVLayout
from kernels.quantized import QuantizedWeight
from kernels.reference.copy_blocks import copy_blocks
from kernels.reference.embedding import embedding
from kernels.reference.gelu_tanh import gelu_tanh, gelu_tanh_and_mul
from kernels.reference.layer_norm import add_layer_norm, layer_norm
from kernels.reference.linear import linear, pack_linear, pack_vector
from kernels.reference.logprobs import logprobs
from kernels.reference.mix_experts import mix_experts
from kernels.reference.paged_attention import pack_angles, paged_attention, plan_attention
from kernels.reference.penalties import penalties
from kernels.reference.relu import relu
from kernels.reference.rms_norm import add_rms_norm, rms_norm
from kernels.reference.rotary import rotary
from kernels.reference.route import route
from kernels.reference.sample import Choices, sample
from kernels.reference.silu_and_mul import silu_and_mul
from kernels.reference.write_kv import write_kv


@dataclass(frozen=True)
class Ops:
    """The operations of one device, under the names of their files; shapes and rules stand there."""

    mixes_types: bool  # activations are float32 whatever weights and cache are; weights may be of few bits
    kv_layout: Callable[..., KVLayout]  # with the fields of a layout up to its dtype
    pack_angles: Callable[[Tensor, Tensor], Any]  # a rope for `paged_attention`, from cosines and sines (P, R)
    plan_attention: Callable[..., Any]  # what it gives only goes back into `paged_attention`
    paged_attention: Callable[..., Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    add_layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_tanh: Callable[[Tensor], Tensor]
    gelu_tanh_and_mul: Callable[[Tensor], Tensor]
    relu: Callable[[Tensor], Tensor]
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    mix_experts: Callable[[Tensor, Tensor, Tensor, Sequence[Callable[[Tensor], Tensor]]], Tensor]
    pack_linear: Callable[[Tensor | QuantizedWeight], Any]  # what `linear` wants as its weight
    pack_vector: Callable[[Tensor], Tensor]  # what norms and sums want as their weight or bias
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]
    join_layers: Callable[[Sizes, Sequence[LayerParts]], Callable[..., Tensor] | None]  # None: not in one call
    embedding: Callable[[Tensor, Any], Tensor]  # of a table, or of a packed weight's rows
    penalties: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    sample: Callable[[Tensor, Choices], Tensor]
    logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]


_REFERENCE = Ops(
    mixes_types=False,
    kv_layout=KVLayout,
    pack_angles=pack_angles,
    plan_attention=plan_attention,
    paged_attention=paged_attention,
    write_kv=write_kv,
    copy_blocks=copy_blocks,
    rotary=rotary,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    layer_norm=layer_norm,
    add_layer_norm=add_layer_norm,
    silu_and_mul=silu_and_mul,
    gelu_tanh=gelu_tanh,
    gelu_tanh_and_mul=gelu_tanh_and_mul,
    relu=relu,
    route=route,
    mix_experts=mix_experts,
    pack_linear=pack_linear,
    pack_vector=pack_vector,
    linear=linear,
    join_layers=lambda _, __: None,
    embedding=embedding,
    penalties=penalties,
    sample=sample,
    logprobs=logprobs,
)

_COMPILED = replace(
    _REFERENCE,
    mixes_types=True,
    kv_layout=attention.kv_layout,
    pack_angles=attention.pack_angles,
    plan_attention=attention.plan_attention,
    paged_attention=attention.paged_attention,
    write_kv=attention.write_kv,
    rotary=elementwise.rotary,
    rms_norm=elementwise.rms_norm,
    add_rms_norm=elementwise.add_rms_norm,
    silu_and_mul=elementwise.silu_and_mul,
    gelu_tanh=elementwise.gelu_tanh,
    gelu_tanh_and_mul=elementwise.gelu_tanh_and_mul,
    pack_vector=elementwise.pack_vector,
    pack_linear=matrix.pack_linear,
    linear=matrix.linear,
    join_layers=decoder_layers.join_layers,
    embedding=matrix.embedding,
    penalties=sampling.penalties,
    sample=sampling.sample,
    logprobs=sampling.logprobs,
)


def ops(device: torch.device) -> Ops:
    """The operations for tensors on `device`; raises ValueError for a kind of device that has none."""
    match device.type:
        case "cpu":
            return _COMPILED if extension.load() else _REFERENCE
        case "cuda":
            return _REFERENCE
    raise ValueError(f"no kernels for device {device.type!r}")


def reference() -> Ops:
    """The plain versions, which run on any device; what the others are tested against."""
    return _REFERENCE

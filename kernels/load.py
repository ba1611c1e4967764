"""Which implementation of each operation a device gets. The only place that chooses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import gelu_tanh as cpu_gelu_tanh
from kernels.cpu import linear as cpu_linear
from kernels.cpu import silu_and_mul as cpu_silu_and_mul
from kernels.reference.copy_blocks import copy_blocks
from kernels.reference.embedding import embedding
from kernels.reference.gelu_tanh import gelu_tanh, gelu_tanh_and_mul
from kernels.reference.greedy import greedy
from kernels.reference.gumbel import gumbel
from kernels.reference.layer_norm import add_layer_norm, layer_norm
from kernels.reference.linear import linear, pack_linear
from kernels.reference.logprobs import logprobs
from kernels.reference.min_p import min_p
from kernels.reference.mix_experts import mix_experts
from kernels.reference.paged_attention import paged_attention, plan_attention
from kernels.reference.penalties import penalties
from kernels.reference.relu import relu
from kernels.reference.rms_norm import add_rms_norm, rms_norm
from kernels.reference.rotary import rotary
from kernels.reference.route import route
from kernels.reference.silu_and_mul import silu_and_mul
from kernels.reference.temperature import temperature
from kernels.reference.top_k import top_k
from kernels.reference.top_p import top_p
from kernels.reference.write_kv import write_kv


@dataclass(frozen=True)
class Ops:
    """The operations of one device, under the names of their files; shapes and rules stand there."""

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
    pack_linear: Callable[[Tensor], Tensor]  # what `linear` wants as its weight
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor]
    penalties: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    greedy: Callable[[Tensor], Tensor]
    temperature: Callable[[Tensor, Tensor], Tensor]
    min_p: Callable[[Tensor, Tensor], Tensor]
    top_k: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    top_p: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gumbel: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], Tensor]
    logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]


_REFERENCE = Ops(
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
    linear=linear,
    embedding=embedding,
    penalties=penalties,
    greedy=greedy,
    temperature=temperature,
    min_p=min_p,
    top_k=top_k,
    top_p=top_p,
    gumbel=gumbel,
    logprobs=logprobs,
)

_CPU = replace(
    _REFERENCE,
    pack_linear=cpu_linear.pack_linear,
    linear=cpu_linear.linear,
    silu_and_mul=cpu_silu_and_mul.silu_and_mul,
    gelu_tanh=cpu_gelu_tanh.gelu_tanh,
    gelu_tanh_and_mul=cpu_gelu_tanh.gelu_tanh_and_mul,
)

_OPS = {"cpu": _CPU, "cuda": _REFERENCE}


def ops(device: torch.device) -> Ops:
    """The operations for tensors on `device`; raises ValueError for a kind of device that has none."""
    if device.type not in _OPS:
        raise ValueError(f"no kernels for device {device.type!r}")
    return _OPS[device.type]


def reference() -> Ops:
    """The plain versions, which run on any device; what the others are tested against."""
    return _REFERENCE

"""Llama 2 and 3, and what has their shape: SmolLM2, TinyLlama and many others.

Families that are a Llama but for a few things read their config by `read_as` and change the spec.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from services.worker.checkpoint.config_json import MOST_PARTS, choice, field, number, size
from services.worker.models.decoder.rope import LARGEST_HEAD, read_max_positions, read_rope
from services.worker.models.spec import GATED_ACTIVATIONS, Activation, DecoderSpec, Family, LayerSpec, WeightNames

NAMES = WeightNames(
    prefixes=("model.", ""),
    layer="layers.{}.",
    modules={"embedding": "embed_tokens", "final_norm": "norm"},
    layer_modules={
        "attention_norm": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
    ignored=("rotary_emb.inv_freq",),
)


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a LlamaForCausalLM, whose feed-forward blocks may have biases too."""
    return replace(read_as("LlamaForCausalLM", config), mlp_bias=field(config, "mlp_bias", bool, False))


def read_as(
    architecture: str,
    config: Mapping[str, Any],
    *,
    max_positions: int = 2048,
    norm_eps: float = 1e-6,
    theta: float = 10000.0,
    activation: Activation | None = None,
    partial: bool = False,
    biased: bool = True,
) -> DecoderSpec:
    """The spec of a decoder of Llama's shape, with the defaults of its family; `activation` if that has been read.

    `partial`: the family may rotate a part of each head only. `biased`: its attention has biases if `attention_bias`
    says so; others pass over that field.
    """
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    head_dim = size(config, "head_dim", hidden // heads, LARGEST_HEAD)
    positions = read_max_positions(config, max_positions)
    bias = biased and field(config, "attention_bias", bool, False)
    gate = choice(config, "hidden_act", GATED_ACTIVATIONS, "silu") if activation is None else activation
    layer = LayerSpec(rope=read_rope(config, head_dim, theta, partial=partial))
    return DecoderSpec(
        architecture=architecture,
        vocab_size=size(config, "vocab_size"),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=size(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=size(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        max_positions=positions,
        layers=(layer,) * size(config, "num_hidden_layers", most=MOST_PARTS),
        tied=field(config, "tie_word_embeddings", bool, False),
        norm="rms",
        norm_eps=number(config, "rms_norm_eps", norm_eps, zero=True),
        activation=gate,
        qkv_bias=bias,
        out_bias=bias,
    )


FAMILY = Family(read, NAMES)

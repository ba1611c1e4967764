"""Llama 2 and 3, and what has their shape: SmolLM2, TinyLlama and many others.

Families that are a Llama but for a few things read their config by `read_as` and change the spec.
"""

from collections.abc import Mapping
from typing import Any

from services.worker.models.config_json import choice, field
from services.worker.models.rope import read_max_positions, read_rope
from services.worker.models.spec import Activation, DecoderSpec, Family, LayerSpec, WeightNames

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

_GATES: Mapping[str, Activation] = {"silu": "silu_and_mul"}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a LlamaForCausalLM."""
    return read_as("LlamaForCausalLM", config)


def read_as(
    architecture: str,
    config: Mapping[str, Any],
    *,
    max_positions: int = 2048,
    norm_eps: float = 1e-6,
    theta: float = 10000.0,
    activation: Activation | None = None,
) -> DecoderSpec:
    """The spec of a decoder of Llama's shape, with the defaults of its family; `activation` if that has been read."""
    hidden, heads = field(config, "hidden_size", int), field(config, "num_attention_heads", int)
    head_dim = field(config, "head_dim", int, hidden // heads)
    bias = field(config, "attention_bias", bool, False)
    gate = choice(config, "hidden_act", _GATES, "silu") if activation is None else activation
    layer = LayerSpec(rope=read_rope(config, head_dim, theta))
    return DecoderSpec(
        architecture=architecture,
        vocab_size=field(config, "vocab_size", int),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=field(config, "intermediate_size", int),
        num_heads=heads,
        num_kv_heads=field(config, "num_key_value_heads", int, heads),
        head_dim=head_dim,
        max_positions=read_max_positions(config, max_positions),
        layers=(layer,) * field(config, "num_hidden_layers", int),
        tied=field(config, "tie_word_embeddings", bool, False),
        norm="rms",
        norm_eps=field(config, "rms_norm_eps", float, norm_eps),
        activation=gate,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=field(config, "mlp_bias", bool, False),
    )


FAMILY = Family(read, NAMES)

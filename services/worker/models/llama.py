"""Llama 2 and 3, and what has their shape: SmolLM2, TinyLlama and many others."""

from collections.abc import Mapping
from typing import Any

from services.worker.models.config_json import field
from services.worker.models.rope import read_max_positions, read_rope
from services.worker.models.spec import DecoderSpec, Family, WeightNames
from shared.errors import ModelError


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a LlamaForCausalLM."""
    if field(config, "hidden_act", str, "silu") != "silu":
        raise ModelError(f"config.json: hidden_act {config['hidden_act']!r} is not supported (supported: silu)")
    hidden, heads = field(config, "hidden_size", int), field(config, "num_attention_heads", int)
    head_dim = field(config, "head_dim", int, hidden // heads)
    return DecoderSpec(
        architecture="LlamaForCausalLM",
        vocab_size=field(config, "vocab_size", int),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=field(config, "intermediate_size", int),
        num_layers=field(config, "num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=field(config, "num_key_value_heads", int, heads),
        head_dim=head_dim,
        max_positions=read_max_positions(config, default=2048),
        tied=field(config, "tie_word_embeddings", bool, False),
        norm="rms",
        norm_eps=field(config, "rms_norm_eps", float, 1e-6),
        activation="silu_and_mul",
        attention_bias=field(config, "attention_bias", bool, False),
        mlp_bias=field(config, "mlp_bias", bool, False),
        rope=read_rope(config, head_dim),
    )


FAMILY = Family(
    read,
    WeightNames(
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
    ),
)

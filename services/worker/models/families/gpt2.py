"""GPT-2: learned positions, layer norms with biases, and weights that are stored the other way round."""

from collections.abc import Mapping
from typing import Any

from services.worker.checkpoint.config_json import MOST_PARTS, choice, field, number, refuse, size
from services.worker.models.spec import PLAIN_ACTIVATIONS, DecoderSpec, Family, LayerSpec, WeightNames


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a GPT2LMHeadModel."""
    refuse(config, scale_attn_by_inverse_layer_idx=True, add_cross_attention=True)
    hidden, heads = size(config, "n_embd", 768), size(config, "n_head", 12)
    return DecoderSpec(
        architecture="GPT2LMHeadModel",
        vocab_size=size(config, "vocab_size"),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=size(config, "n_inner", 4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=size(config, "n_positions", 1024),
        layers=(LayerSpec(),) * size(config, "n_layer", 12, MOST_PARTS),
        tied=field(config, "tie_word_embeddings", bool, True),
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5, zero=True),
        activation=choice(config, "activation_function", PLAIN_ACTIVATIONS, "gelu_new"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        position_offset=0,
        attention_scale=None if field(config, "scale_attn_weights", bool, True) else 1.0,
    )


FAMILY = Family(
    read,
    WeightNames(
        prefixes=("transformer.", ""),
        layer="h.{}.",
        modules={"embedding": "wte", "positions": "wpe", "final_norm": "ln_f"},
        layer_modules={
            "attention_norm": ("ln_1",),
            "qkv": ("attn.c_attn",),
            "out": ("attn.c_proj",),
            "mlp_norm": ("ln_2",),
            "up": ("mlp.c_fc",),
            "down": ("mlp.c_proj",),
        },
        transposed=("qkv", "out", "up", "down"),
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
)

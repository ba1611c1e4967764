"""GPT-2: learned positions, layer norms with biases, and weights that are stored the other way round."""

from collections.abc import Mapping
from typing import Any

from services.worker.models.config_json import choice, field, refuse
from services.worker.models.spec import Activation, DecoderSpec, Family, LayerSpec, WeightNames

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a GPT2LMHeadModel."""
    refuse(config, scale_attn_by_inverse_layer_idx=True, add_cross_attention=True)
    hidden, heads = field(config, "n_embd", int, 768), field(config, "n_head", int, 12)
    return DecoderSpec(
        architecture="GPT2LMHeadModel",
        vocab_size=field(config, "vocab_size", int),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=field(config, "n_inner", int, 4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=field(config, "n_positions", int, 1024),
        layers=(LayerSpec(),) * field(config, "n_layer", int, 12),
        tied=field(config, "tie_word_embeddings", bool, True),
        norm="layer",
        norm_eps=field(config, "layer_norm_epsilon", float, 1e-5),
        activation=choice(config, "activation_function", _ACTIVATIONS, "gelu_new"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        learned_positions=0,
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

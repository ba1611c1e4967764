"""OPT: learned positions, layer norms with biases, a plain ReLU block; its 350m normalises after the sum."""

from collections.abc import Mapping
from typing import Any

from services.worker.models.config_json import field
from services.worker.models.spec import DecoderSpec, Family, WeightNames
from shared.errors import ModelError


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of an OPTForCausalLM."""
    if field(config, "activation_function", str, "relu") != "relu":
        name = config["activation_function"]
        raise ModelError(f"config.json: activation_function {name!r} is not supported (supported: relu)")
    if not field(config, "layer_norm_elementwise_affine", bool, True):
        raise ModelError("config.json: layer_norm_elementwise_affine false is not supported")
    hidden, heads = field(config, "hidden_size", int), field(config, "num_attention_heads", int)
    norm_first = field(config, "do_layer_norm_before", bool, True)
    bias = field(config, "enable_bias", bool, True)
    return DecoderSpec(
        architecture="OPTForCausalLM",
        vocab_size=field(config, "vocab_size", int),
        hidden_size=hidden,
        embedding_size=field(config, "word_embed_proj_dim", int, hidden),
        intermediate_size=field(config, "ffn_dim", int),
        num_layers=field(config, "num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=field(config, "max_position_embeddings", int, 2048),
        tied=field(config, "tie_word_embeddings", bool, True),
        norm="layer",
        norm_eps=1e-5,
        activation="relu",
        norm_first=norm_first,
        final_norm=norm_first and not field(config, "_remove_final_layer_norm", bool, False),
        attention_bias=bias,
        mlp_bias=bias,
        learned_positions=2,
    )


FAMILY = Family(
    read,
    WeightNames(
        prefixes=("model.decoder.", "decoder."),
        layer="layers.{}.",
        modules={
            "embedding": "embed_tokens",
            "positions": "embed_positions",
            "project_in": "project_in",
            "project_out": "project_out",
            "final_norm": "final_layer_norm",
        },
        layer_modules={
            "attention_norm": ("self_attn_layer_norm",),
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out": ("self_attn.out_proj",),
            "mlp_norm": ("final_layer_norm",),
            "up": ("fc1",),
            "down": ("fc2",),
        },
    ),
)

"""OPT: learned positions, layer norms with biases, a block without a gate; its 350m normalises after the sum."""

from collections.abc import Mapping
from typing import Any

from services.worker.checkpoint.config_json import MOST_PARTS, choice, field, refuse, size
from services.worker.models.spec import PLAIN_ACTIVATIONS, DecoderSpec, Family, LayerSpec, WeightNames


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of an OPTForCausalLM."""
    refuse(config, layer_norm_elementwise_affine=False)
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    norm_first = field(config, "do_layer_norm_before", bool, True)
    bias = field(config, "enable_bias", bool, True)
    return DecoderSpec(
        architecture="OPTForCausalLM",
        vocab_size=size(config, "vocab_size"),
        hidden_size=hidden,
        embedding_size=size(config, "word_embed_proj_dim", hidden),
        intermediate_size=size(config, "ffn_dim"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=size(config, "max_position_embeddings", 2048),
        layers=(LayerSpec(),) * size(config, "num_hidden_layers", most=MOST_PARTS),
        tied=field(config, "tie_word_embeddings", bool, True),
        norm="layer",
        norm_eps=1e-5,
        activation=choice(config, "activation_function", PLAIN_ACTIVATIONS, "relu"),
        norm_first=norm_first,
        final_norm=norm_first and not field(config, "_remove_final_layer_norm", bool, False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        position_offset=2,
    )


FAMILY = Family(
    read,
    WeightNames(
        prefixes=("model.decoder.", "decoder.", "model.", ""),
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

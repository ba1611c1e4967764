"""OPT: learned positions, layer norms with biases, no gate; OPT-350m has post-norm layers."""

from services.worker.checkpoint.config_json import MAX_MODULES, ConfigJson
from services.worker.models.spec import PLAIN_ACTIVATIONS, DecoderSpec, Family, LayerSpec, WeightNames


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of an OPTForCausalLM."""
    config.refuse(layer_norm_elementwise_affine=False)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    norm_first = config.field("do_layer_norm_before", bool, True)
    bias = config.field("enable_bias", bool, True)
    return DecoderSpec(
        architecture="OPTForCausalLM",
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        embedding_size=config.size("word_embed_proj_dim", hidden),
        intermediate_size=config.size("ffn_dim"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=config.size("max_position_embeddings", 2048),
        layers=(LayerSpec(),) * config.size("num_hidden_layers", maximum=MAX_MODULES),
        tied=config.field("tie_word_embeddings", bool, True),
        norm="layer",
        norm_eps=1e-5,
        activation=config.choice("activation_function", PLAIN_ACTIVATIONS, "relu"),
        norm_first=norm_first,
        final_norm=norm_first and not config.field("_remove_final_layer_norm", bool, False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        position_offset=2,
    )


FAMILY = Family(
    read_spec,
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

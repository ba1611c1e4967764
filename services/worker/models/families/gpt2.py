"""GPT-2: learned positions, layer norms with biases, and transposed weights."""

from services.worker.checkpoint.config_json import MAX_MODULES, ConfigJson
from services.worker.models.spec import PLAIN_ACTIVATIONS, DecoderSpec, Family, LayerSpec, WeightNames


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a GPT2LMHeadModel."""
    config.refuse(scale_attn_by_inverse_layer_idx=True, add_cross_attention=True)
    hidden, heads = config.size("n_embd", 768), config.size("n_head", 12)
    return DecoderSpec(
        architecture="GPT2LMHeadModel",
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=config.size("n_inner", 4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=config.size("n_positions", 1024),
        layers=(LayerSpec(),) * config.size("n_layer", 12, MAX_MODULES),
        tied=config.field("tie_word_embeddings", bool, True),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5, zero=True),
        activation=config.choice("activation_function", PLAIN_ACTIVATIONS, "gelu_new"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        position_offset=0,
        attention_scale=None if config.field("scale_attn_weights", bool, True) else 1.0,
    )


FAMILY = Family(
    read_spec,
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
        ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
    ),
)

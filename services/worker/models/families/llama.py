"""Llama 2 and 3, and models of the same architecture: SmolLM2, TinyLlama and many others.

Families that differ from Llama in a few fields call `base_spec` and replace those fields.
"""

from msgspec.structs import replace

from services.worker.checkpoint.config_json import MAX_MODULES, ConfigJson
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
    ignored_suffixes=("rotary_emb.inv_freq",),
)


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a LlamaForCausalLM, the only family here with `mlp_bias`."""
    return replace(base_spec("LlamaForCausalLM", config), mlp_bias=config.field("mlp_bias", bool, False))


def base_spec(
    architecture: str,
    config: ConfigJson,
    *,
    max_positions: int = 2048,
    norm_eps: float = 1e-6,
    theta: float = 10000.0,
    activation: Activation | None = None,
    partial: bool = False,
    biased: bool = True,
) -> DecoderSpec:
    """Return the spec of a model like Llama. The parameters are the family's defaults for absent fields.

    `activation` overrides the field `hidden_act`. `partial`: the family has `partial_rotary_factor`. `biased`: the
    family has `attention_bias`; other families ignore that field.
    """
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size("head_dim", hidden // heads, LARGEST_HEAD)
    positions = read_max_positions(config, max_positions)
    bias = biased and config.field("attention_bias", bool, False)
    gate = config.choice("hidden_act", GATED_ACTIVATIONS, "silu") if activation is None else activation
    layer = LayerSpec(rope=read_rope(config, head_dim, theta, partial=partial))
    return DecoderSpec(
        architecture=architecture,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads", heads),
        head_dim=head_dim,
        max_positions=positions,
        layers=(layer,) * config.size("num_hidden_layers", maximum=MAX_MODULES),
        tied=config.field("tie_word_embeddings", bool, False),
        norm="rms",
        norm_eps=config.number("rms_norm_eps", norm_eps, zero=True),
        activation=gate,
        qkv_bias=bias,
        out_bias=bias,
    )


FAMILY = Family(read_spec, NAMES)

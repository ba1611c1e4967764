"""Gemma 3: norms of queries and keys, and other rotary frequencies in layers with a sliding window.

Quire serves the text model of multimodal checkpoints, and ignores their vision tower.
"""

from typing import Any

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson, UnsupportedByFamily, convert
from services.worker.models.decoder.rope import read_rope
from services.worker.models.decoder.windows import sliding_layers, with_windows
from services.worker.models.families import gemma, gemma2
from services.worker.models.spec import DecoderSpec, Family

_DEFAULTS = {  # configs of multimodal models leave out fields with these values
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
}  # fmt: skip

NAMES = replace(
    gemma2.NAMES,
    prefixes=(
        "model.",
        "",
        "model.language_model.",
        "language_model.model.",
        "language_model.",
        "model.language_model.model.",
        "language_model.model.model.",
    ),
    layer_modules={**gemma2.NAMES.layer_modules, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)},
    unsupported_prefixes=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a Gemma3ForCausalLM, or of the text model in a Gemma3ForConditionalGeneration."""
    if config.get("text_config") is None:
        architecture, text_config = "Gemma3ForCausalLM", config
    else:
        architecture = "Gemma3ForConditionalGeneration"
        text_config = ConfigJson(convert(config["text_config"], "text_config", dict[str, Any]))
        # The outer config says if the output layer is tied to the embedding.
        text_config = text_config.replace(tie_word_embeddings=config.get("tie_word_embeddings", True))
    text_config = text_config.with_defaults(**_DEFAULTS)
    if text_config.get("attn_logit_softcapping") is not None:
        raise UnsupportedByFamily("config.json: attn_logit_softcapping is not supported in Gemma 3")
    full_config, sliding_config = _rope_configs(text_config)
    spec = replace(
        gemma.base_spec(architecture, full_config),
        max_positions=text_config.size("max_position_embeddings"),  # includes the rope's factor
        post_norms=True,
        qk_norm=True,
        attention_scale=text_config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=gemma2.softcap(text_config, "final_logit_softcapping", 0.0),
    )
    pattern = text_config.size("sliding_window_pattern", text_config.size("_sliding_window_pattern", 6))
    sliding = sliding_layers(text_config, [(index + 1) % pattern != 0 for index in range(spec.num_layers)])
    rope = read_rope(sliding_config, spec.head_dim)
    layers = [replace(layer, rope=rope) if slide else layer for layer, slide in zip(spec.layers, sliding, strict=True)]
    return with_windows(replace(spec, layers=tuple(layers)), text_config.nullable("sliding_window", int, 4096), sliding)


def _rope_configs(config: ConfigJson) -> tuple[ConfigJson, ConfigJson]:
    """Return the config for the rope of layers with full attention, and the config for layers with a sliding window.

    If there are `rope_scaling` and `rope_parameters`, `rope_scaling` overrides fields of full attention only, as in
    transformers.
    """
    by_layer, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    theta = config.field("rope_theta", float, 1_000_000.0)
    local_theta = config.field("rope_local_base_freq", float, 10_000.0)
    full = convert(by_layer.get("full_attention") or {}, "rope_parameters: full_attention", dict[str, Any])
    windowed = by_layer.get("sliding_attention") or {}
    return (
        config.replace(rope_scaling=None, rope_theta=theta, rope_parameters={**full, **scaling}),
        config.replace(rope_scaling=None, rope_theta=local_theta, rope_parameters=windowed),
    )


FAMILY = Family(read_spec, NAMES)

"""Gemma 3: queries and keys are normalised, and layers with a window have a rope of their own.

Models that take images too are served without that part.
"""

from dataclasses import replace as with_fields
from typing import Any

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson, UnsupportedByFamily, convert
from services.worker.models.decoder.rope import read_rope
from services.worker.models.decoder.windows import sliding, with_windows
from services.worker.models.families import gemma, gemma2
from services.worker.models.spec import DecoderSpec, Family

_DEFAULTS = {  # the configs of models with images leave out what equals these
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
}  # fmt: skip

NAMES = with_fields(
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
    unserved=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)


def read(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a Gemma3ForCausalLM, or of the text model in a Gemma3ForConditionalGeneration."""
    if config.get("text_config") is None:
        architecture, text = "Gemma3ForCausalLM", config
    else:
        architecture = "Gemma3ForConditionalGeneration"
        text = ConfigJson(convert(config["text_config"], "text_config", dict[str, Any]))
        # The head belongs to the whole model, whose field says if it is tied.
        text = text.replace(tie_word_embeddings=config.get("tie_word_embeddings", True))
    text = text.with_defaults(**_DEFAULTS)
    if text.get("attn_logit_softcapping") is not None:
        raise UnsupportedByFamily("config.json: attn_logit_softcapping is not supported in Gemma 3")
    full, windowed = _rope_configs(text)
    spec = replace(
        gemma.read_as(architecture, full),
        max_positions=text.size("max_position_embeddings"),  # to which the rope is stretched already
        post_norms=True,
        qk_norm=True,
        attention_scale=text.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=gemma2.softcap(text, "final_logit_softcapping", 0.0),
    )
    pattern = text.size("sliding_window_pattern", text.size("_sliding_window_pattern", 6))
    slides = sliding(text, [(index + 1) % pattern != 0 for index in range(spec.num_layers)])
    rope = read_rope(windowed, spec.head_dim)
    layers = [replace(layer, rope=rope) if slide else layer for layer, slide in zip(spec.layers, slides, strict=True)]
    return with_windows(replace(spec, layers=tuple(layers)), text.nullable("sliding_window", int, 4096), slides)


def _rope_configs(config: ConfigJson) -> tuple[ConfigJson, ConfigJson]:
    """Return the config as it is for the rope of layers that see all, and for that of layers with a window.

    A `rope_scaling` beside `rope_parameters` is laid over the part for layers that see all, as in transformers.
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


FAMILY = Family(read, NAMES)

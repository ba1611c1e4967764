"""Gemma 3: queries and keys are normalised, and layers with a window have a rope of their own.

Of the models that take images too, the part for text is served.
"""

from collections.abc import Mapping
from dataclasses import replace as with_fields
from typing import Any

from msgspec.structs import replace

from services.worker.checkpoint.config_json import UnsupportedByFamily, convert, field, nullable, number, size
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


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Gemma3ForCausalLM, or of the text model in a Gemma3ForConditionalGeneration."""
    within = config.get("text_config")
    architecture = "Gemma3ForCausalLM" if within is None else "Gemma3ForConditionalGeneration"
    text = _DEFAULTS | (dict(config) if within is None else convert(within, "text_config", dict[str, Any]))
    if within is not None:  # the head is the whole model's, and so is the word on it
        text["tie_word_embeddings"] = config.get("tie_word_embeddings", True)
    if text.get("attn_logit_softcapping") is not None:
        raise UnsupportedByFamily("config.json: attn_logit_softcapping is not supported in Gemma 3")
    far, near = _ropes(text)
    spec = replace(
        gemma.read_as(architecture, far),
        max_positions=size(text, "max_position_embeddings"),  # to which the rope is stretched already
        post_norms=True,
        qk_norm=True,
        attention_scale=number(text, "query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=gemma2.softcap(text, "final_logit_softcapping", 0.0),
    )
    pattern = size(text, "sliding_window_pattern", size(text, "_sliding_window_pattern", 6))
    slides = sliding(text, [(index + 1) % pattern != 0 for index in range(spec.num_layers)])
    rope = read_rope(near, spec.head_dim)
    layers = [replace(layer, rope=rope) if slide else layer for layer, slide in zip(spec.layers, slides, strict=True)]
    return with_windows(replace(spec, layers=tuple(layers)), nullable(text, "sliding_window", int, 4096), slides)


def _ropes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config as layers that see all read it, and as those with a window do.

    A `rope_scaling` beside `rope_parameters` is laid over the part for layers that see all, as in transformers.
    """
    both = convert(config.get("rope_parameters") or {}, "rope_parameters", dict[str, Any])
    scaling = convert(config.get("rope_scaling") or {}, "rope_scaling", dict[str, Any])
    theta = field(config, "rope_theta", float, 1_000_000.0)
    local = field(config, "rope_local_base_freq", float, 10_000.0)
    everywhere = convert(both.get("full_attention") or {}, "rope_parameters: full_attention", dict[str, Any])
    far = everywhere | scaling
    near = both.get("sliding_attention") or {}
    plain = {**config, "rope_scaling": None}
    return (
        {**plain, "rope_theta": theta, "rope_parameters": far},
        {**plain, "rope_theta": local, "rope_parameters": near},
    )


FAMILY = Family(read, NAMES)

"""Gemma 2: softcaps, norms behind the blocks too, and a window in every other layer."""

from dataclasses import replace as with_fields

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.windows import sliding, with_windows
from services.worker.models.families import gemma, llama
from services.worker.models.spec import DecoderSpec, Family

NAMES = with_fields(
    llama.NAMES,
    layer_modules={
        **llama.NAMES.layer_modules,
        "attention_post_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    },
)


def read(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a Gemma2ForCausalLM."""
    spec = replace(
        gemma.read_as("Gemma2ForCausalLM", config),
        post_norms=True,
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=softcap(config, "attn_logit_softcapping", 50.0),
        logit_softcap=softcap(config, "final_logit_softcapping", 30.0),
    )
    slides = sliding(config, [index % 2 == 0 for index in range(spec.num_layers)])
    return with_windows(spec, config.nullable("sliding_window", int, 4096), slides)


def softcap(config: ConfigJson, name: str, default: float) -> float:
    """Return the bound in the field `name`; 0 and null are none, absent it is `default`."""
    return 0.0 if name in config and config[name] is None else config.number(name, default, zero=True)


FAMILY = Family(read, NAMES)

"""Gemma 2: softcaps, norms before and after each block, and a sliding window in every other layer."""

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.windows import sliding_layers, with_windows
from services.worker.models.families import gemma, llama
from services.worker.models.spec import DecoderSpec, Family

NAMES = replace(
    llama.NAMES,
    layer_modules={
        **llama.NAMES.layer_modules,
        "attention_post_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    },
)


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a Gemma2ForCausalLM."""
    spec = replace(
        gemma.base_spec("Gemma2ForCausalLM", config),
        post_norms=True,
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=softcap(config, "attn_logit_softcapping", 50.0),
        logit_softcap=softcap(config, "final_logit_softcapping", 30.0),
    )
    sliding = sliding_layers(config, [index % 2 == 0 for index in range(spec.num_layers)])
    return with_windows(spec, config.nullable("sliding_window", int, 4096), sliding)


def softcap(config: ConfigJson, name: str, default: float) -> float:
    """Return the softcap in the field `name`: 0 (none) if it is null, `default` if it is absent."""
    return 0.0 if name in config and config[name] is None else config.number(name, default, zero=True)


FAMILY = Family(read_spec, NAMES)

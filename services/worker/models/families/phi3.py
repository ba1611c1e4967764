"""Phi-3, 3.5 and Phi-4: a Llama whose projections are stored in one piece, and that may rotate a part of each head."""

from dataclasses import replace as with_fields

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.rope import read_rope_type, read_scaling
from services.worker.models.decoder.windows import with_window
from services.worker.models.families import llama
from services.worker.models.spec import DecoderSpec, Family

NAMES = with_fields(
    llama.NAMES,
    layer_modules={**llama.NAMES.layer_modules, "qkv": ("self_attn.qkv_proj",), "up": ("mlp.gate_up_proj",)},
)


def read(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a Phi3ForCausalLM."""
    config = config.with_defaults(original_max_position_embeddings=4096)
    scaling = read_scaling(config)
    if read_rope_type(scaling) in ("su", "yarn"):  # early names of what is longrope now
        config = config.replace(rope_scaling={**scaling, "rope_type": "longrope"})
    spec = llama.read_as("Phi3ForCausalLM", config, max_positions=4096, norm_eps=1e-5, partial=True, biased=False)
    return with_window(spec, config.nullable("sliding_window", int))


FAMILY = Family(read, NAMES)

"""Phi-3, 3.5 and Phi-4: a Llama with qkv and gate_up stored as one tensor each, and maybe partial rotary embeddings."""

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.rope import read_rope_type, read_scaling
from services.worker.models.decoder.windows import with_window
from services.worker.models.families import llama
from services.worker.models.spec import DecoderSpec, Family

NAMES = replace(
    llama.NAMES,
    layer_modules={**llama.NAMES.layer_modules, "qkv": ("self_attn.qkv_proj",), "up": ("mlp.gate_up_proj",)},
)


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a Phi3ForCausalLM."""
    config = config.with_defaults(original_max_position_embeddings=4096)
    scaling = read_scaling(config)
    if read_rope_type(scaling) in ("su", "yarn"):  # earlier names of longrope
        config = config.replace(rope_scaling={**scaling, "rope_type": "longrope"})
    spec = llama.base_spec("Phi3ForCausalLM", config, max_positions=4096, norm_eps=1e-5, partial=True, biased=False)
    return with_window(spec, config.nullable("sliding_window", int))


FAMILY = Family(read_spec, NAMES)

"""Qwen3: a Llama that normalises each head's query and key, and whose upper layers may see a window."""

from dataclasses import replace as with_fields

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.families import llama, qwen2
from services.worker.models.spec import DecoderSpec, Family

NAMES = with_fields(
    llama.NAMES,
    layer_modules={**llama.NAMES.layer_modules, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)},
)


def read(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a Qwen3ForCausalLM."""
    spec = llama.read_as("Qwen3ForCausalLM", config.with_defaults(head_dim=128), max_positions=32768)
    return qwen2.with_upper_windows(replace(spec, qk_norm=True), config)


FAMILY = Family(read, NAMES)

"""Qwen3: a Llama with norms of queries and keys, and maybe sliding windows in its upper layers."""

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.families import llama, qwen2
from services.worker.models.spec import DecoderSpec, Family

NAMES = replace(
    llama.NAMES,
    layer_modules={**llama.NAMES.layer_modules, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)},
)


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a Qwen3ForCausalLM."""
    spec = llama.base_spec("Qwen3ForCausalLM", config.with_defaults(head_dim=128), max_positions=32768)
    return qwen2.with_upper_windows(replace(spec, qk_norm=True), config)


FAMILY = Family(read_spec, NAMES)

"""Qwen2 and 2.5: a Llama with a bias of qkv, and maybe sliding windows in its upper layers."""

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.windows import sliding_layers, with_windows
from services.worker.models.families import llama
from services.worker.models.spec import DecoderSpec, Family


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a Qwen2ForCausalLM."""
    spec = replace(llama.base_spec("Qwen2ForCausalLM", config, max_positions=32768), qkv_bias=True, out_bias=False)
    return with_upper_windows(spec, config)


def with_upper_windows(spec: DecoderSpec, config: ConfigJson) -> DecoderSpec:
    """Return `spec` with sliding windows from layer `max_window_layers` on, if the config has `use_sliding_window`."""
    window = config.nullable("sliding_window", int, 4096) if config.field("use_sliding_window", bool, False) else None
    first = config.field("max_window_layers", int, 28)
    sliding = sliding_layers(config, [window is not None and index >= first for index in range(spec.num_layers)])
    return with_windows(spec, window, sliding)


FAMILY = Family(read_spec, llama.NAMES)

"""Mistral: a Llama that may have sliding windows, in all layers or in some."""

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.windows import sliding_layers, with_windows
from services.worker.models.families import llama
from services.worker.models.spec import DecoderSpec, Family


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a MistralForCausalLM."""
    spec = llama.base_spec("MistralForCausalLM", config, max_positions=131072, biased=False)
    window = config.nullable("sliding_window", int, 4096)
    return with_windows(spec, window, sliding_layers(config, [window is not None] * spec.num_layers))


FAMILY = Family(read_spec, llama.NAMES)

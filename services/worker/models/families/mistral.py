"""Mistral: a Llama whose layers, or some of them, may see a window of the context."""

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.windows import sliding, with_windows
from services.worker.models.families import llama
from services.worker.models.spec import DecoderSpec, Family


def read(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a MistralForCausalLM."""
    spec = llama.read_as("MistralForCausalLM", config, max_positions=131072, biased=False)
    window = config.nullable("sliding_window", int, 4096)
    return with_windows(spec, window, sliding(config, [window is not None] * spec.num_layers))


FAMILY = Family(read, llama.NAMES)

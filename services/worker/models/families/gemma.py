"""Gemma: a Llama with scaled embeddings, norm weights stored minus 1, and gelu instead of silu."""

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.families import llama
from services.worker.models.spec import GATED_ACTIVATIONS, Activation, DecoderSpec, Family
from shared.errors import ModelError


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a GemmaForCausalLM. Its early configs say gelu, and mean the tanh approximation."""
    name = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    activation = config.choice(
        name, {**GATED_ACTIVATIONS, "gelu": GATED_ACTIVATIONS["gelu_pytorch_tanh"]}, "gelu_pytorch_tanh"
    )
    return base_spec("GemmaForCausalLM", config, activation=activation)


def base_spec(architecture: str, config: ConfigJson, activation: Activation | None = None) -> DecoderSpec:
    """Return the spec that all versions of Gemma share; each version changes a few of its fields."""
    if config.field("use_bidirectional_attention", bool, False):  # an encoder
        raise ModelError("config.json: use_bidirectional_attention true is not supported")
    activation = activation or config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh")
    config = config.with_defaults(head_dim=256, tie_word_embeddings=True)
    spec = llama.base_spec(architecture, config, max_positions=8192, activation=activation)
    return replace(spec, norm="rms_plus_one", embedding_scale=spec.hidden_size**0.5)


FAMILY = Family(read_spec, llama.NAMES)

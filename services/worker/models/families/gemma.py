"""Gemma: a Llama with scaled embeddings, norms kept as the distance from 1, and a gate of gelu."""

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.families import llama
from services.worker.models.spec import GATED_ACTIVATIONS, Activation, DecoderSpec, Family
from shared.errors import ModelError


def read(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a GemmaForCausalLM, whose first configs say gelu and mean its approximation by tanh."""
    name = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    activation = config.choice(
        name, {**GATED_ACTIVATIONS, "gelu": GATED_ACTIVATIONS["gelu_pytorch_tanh"]}, "gelu_pytorch_tanh"
    )
    return read_as("GemmaForCausalLM", config, activation=activation)


def read_as(architecture: str, config: ConfigJson, activation: Activation | None = None) -> DecoderSpec:
    """Return the spec of a Gemma of any version, with the fields that all versions share."""
    if config.field("use_bidirectional_attention", bool, False):  # nobody's code makes a decoder of such a model
        raise ModelError("config.json: use_bidirectional_attention true is not supported")
    activation = activation or config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh")
    config = config.with_defaults(head_dim=256, tie_word_embeddings=True)
    spec = llama.read_as(architecture, config, max_positions=8192, activation=activation)
    return replace(spec, norm="rms_plus_one", embedding_scale=spec.hidden_size**0.5)


FAMILY = Family(read, llama.NAMES)

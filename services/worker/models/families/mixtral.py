"""Mixtral: a Mistral with experts in place of each feed-forward block."""

from dataclasses import replace as with_fields

from msgspec.structs import replace

from services.worker.checkpoint.config_json import MAX_MODULES, ConfigJson
from services.worker.models.decoder.windows import with_window
from services.worker.models.families import llama
from services.worker.models.spec import DecoderSpec, Experts, Family
from shared.errors import ModelError

NAMES = with_fields(
    llama.NAMES,
    layer_modules={
        **llama.NAMES.layer_modules,
        "router": ("block_sparse_moe.gate",),
        "experts.up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "experts.down": ("block_sparse_moe.experts.{}.w2",),
    },
    stacked_experts={
        "experts.up": "block_sparse_moe.experts.gate_up_proj",
        "experts.down": "block_sparse_moe.experts.down_proj",
    },
    renamed={".mlp.": ".block_sparse_moe."},  # as transformers has called it since its version 5
)


def read(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a MixtralForCausalLM."""
    spec = llama.read_as("MixtralForCausalLM", config, max_positions=131072, norm_eps=1e-5, theta=1e6, biased=False)
    experts = read_experts(config, count=8, top_k=2, intermediate_size=spec.intermediate_size, normalised=True)
    spec = replace(spec, layers=tuple(replace(layer, experts=experts) for layer in spec.layers))
    return with_window(spec, config.nullable("sliding_window", int))


def read_experts(config: ConfigJson, *, count: int, top_k: int, intermediate_size: int, normalised: bool) -> Experts:
    """Return the experts, whose number has one of two names, and how many of them a token uses."""
    name = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    count = config.size(name, count, MAX_MODULES)
    top_k = config.size("num_experts_per_tok", top_k)
    if top_k > count:
        raise ModelError(f"config.json: num_experts_per_tok is {top_k}, of {count} experts")
    return Experts(count, top_k, intermediate_size, normalised)


FAMILY = Family(read, NAMES)

"""Mixtral: a Mistral with experts in place of each feed-forward block."""

from msgspec.structs import replace

from services.worker.checkpoint.config_json import MAX_MODULES, ConfigJson
from services.worker.models.decoder.windows import with_window
from services.worker.models.families import llama
from services.worker.models.spec import DecoderSpec, Experts, Family
from shared.errors import ModelError

NAMES = replace(
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
    renamed={".mlp.": ".block_sparse_moe."},  # the name since version 5 of transformers
)


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a MixtralForCausalLM."""
    spec = llama.base_spec("MixtralForCausalLM", config, max_positions=131072, norm_eps=1e-5, theta=1e6, biased=False)
    experts = read_experts(config, count=8, top_k=2, intermediate_size=spec.intermediate_size, renormalize=True)
    spec = replace(spec, layers=tuple(replace(layer, experts=experts) for layer in spec.layers))
    return with_window(spec, config.nullable("sliding_window", int))


def read_experts(config: ConfigJson, *, count: int, top_k: int, intermediate_size: int, renormalize: bool) -> Experts:
    """Return the experts of a layer. `count` and `top_k` are defaults; the field for the count has one of two names."""
    name = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    count = config.size(name, count, MAX_MODULES)
    top_k = config.size("num_experts_per_tok", top_k)
    if top_k > count:
        raise ModelError(f"config.json: num_experts_per_tok is {top_k}, of {count} experts")
    return Experts(count, top_k, intermediate_size, renormalize)


FAMILY = Family(read_spec, NAMES)

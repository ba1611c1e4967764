"""Qwen3-MoE: a Qwen3 with experts in most or all layers."""

from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson, convert
from services.worker.models.decoder.windows import with_window
from services.worker.models.families import llama, qwen3
from services.worker.models.families.mixtral import read_experts
from services.worker.models.spec import DecoderSpec, Family

NAMES = replace(
    qwen3.NAMES,
    layer_modules={
        **qwen3.NAMES.layer_modules,
        "router": ("mlp.gate",),
        "experts.up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "experts.down": ("mlp.experts.{}.down_proj",),
    },
    stacked_experts={"experts.up": "mlp.experts.gate_up_proj", "experts.down": "mlp.experts.down_proj"},
)


def read_spec(config: ConfigJson) -> DecoderSpec:
    """Return the spec of a Qwen3MoeForCausalLM."""
    spec = replace(llama.base_spec("Qwen3MoeForCausalLM", config, max_positions=32768), qk_norm=True)
    experts = read_experts(
        config,
        count=128,
        top_k=8,
        intermediate_size=config.size("moe_intermediate_size", 768),
        renormalize=config.field("norm_topk_prob", bool, False),
    )
    every = config.size("decoder_sparse_step", 1)
    dense = convert(config.get("mlp_only_layers") or [], "mlp_only_layers", list[int])
    has_experts = [(index + 1) % every == 0 and index not in dense for index in range(spec.num_layers)]
    pairs = zip(spec.layers, has_experts, strict=True)
    layers = [replace(layer, experts=experts) if has else layer for layer, has in pairs]
    window = config.nullable("sliding_window", int, 4096) if config.field("use_sliding_window", bool, False) else None
    return with_window(replace(spec, layers=tuple(layers)), window)


FAMILY = Family(read_spec, NAMES)

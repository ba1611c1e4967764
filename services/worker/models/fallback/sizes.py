"""Checks the sizes in a config that transformers has read, before its code uses them.

If one is wrong, transformers' code raises errors that name no field, or begins to build a million layers.
"""

from typing import Any

from services.worker.checkpoint.config_json import MAX_MODULES, ConfigJson, check_size

_SIZES = {
    "vocab_size", "hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "n_heads",
    "num_key_value_heads", "max_position_embeddings", "n_positions",
}  # fmt: skip
_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
_EXPERTS = {"num_local_experts", "num_experts", "n_routed_experts"}  # 0: there are none
_EPSILONS = {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"}


def check_sizes(config: Any) -> None:
    """Check the `PreTrainedConfig` of a text model. Raise ModelError naming a field whose number is out of range."""
    fields = {name: value for name, value in vars(config).items() if isinstance(value, int | float)}
    for name, value in fields.items():
        if name in _SIZES:
            check_size(name, int(value))
        if name in _LAYERS or (name in _EXPERTS and value):
            check_size(name, int(value), MAX_MODULES)
        if name in _EPSILONS:
            ConfigJson(fields).number(name, zero=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_theta") is not None:
            ConfigJson(part).number("rope_theta")

"""Sizes of a config that transformers read, checked before its code works with them.

They have many names, and most models have some of these. Where one is wrong the code behind raises errors that name no
field, or sets out to make a million layers.
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
    """Of the `PreTrainedConfig` of a text model. Raises ModelError naming a field whose number cannot be."""
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

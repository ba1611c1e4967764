"""What is tested of each family: tiny models with all that a config can switch on, by name.

Windows are far shorter than the contexts of the tests.
"""

from collections.abc import Callable
from typing import Any

from transformers import (
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.models.tiny import LLAMA, llama, opt, tiny

WINDOW = 7
MIXED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}


def mistral(**changes: Any) -> PreTrainedModel:
    return tiny(MistralConfig(**(LLAMA | {"sliding_window": WINDOW} | changes)))


def qwen2(**changes: Any) -> PreTrainedModel:
    return tiny(Qwen2Config(**(LLAMA | changes)))


def qwen3(**changes: Any) -> PreTrainedModel:
    return tiny(Qwen3Config(**(LLAMA | {"head_dim": 14} | changes)))


VARIANTS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(),
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama, wide heads": lambda: llama(head_dim=14, num_attention_heads=3, num_key_value_heads=1),
    "llama, no groups": lambda: llama(num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1),
    "opt": lambda: opt(),
    "opt, 350m's shape": lambda: opt(do_layer_norm_before=False, word_embed_proj_dim=24),
    "opt, projected": lambda: opt(word_embed_proj_dim=24),
    "opt, no biases": lambda: opt(enable_bias=False),
    "opt, untied": lambda: opt(tie_word_embeddings=False),
    "mistral": mistral,
    "mistral, no window": lambda: mistral(sliding_window=None, head_dim=8),
    "qwen2": lambda: qwen2(tie_word_embeddings=True),
    "qwen2, window above": lambda: qwen2(**MIXED),
    "qwen2, layer types": lambda: qwen2(**MIXED, layer_types=["full_attention", "sliding_attention", "full_attention"]),
    "qwen3": qwen3,
    "qwen3, biases, window": lambda: qwen3(attention_bias=True, **MIXED),
}

"""The tested variants of each family, by name: tiny models with everything that a config can switch on.

Their windows are far shorter than the contexts of the tests.
"""

from collections.abc import Callable
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.models.tiny_models import LLAMA, llama, opt, tiny

WINDOW = 7
MIXED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}


def mistral(**changes: Any) -> PreTrainedModel:
    return tiny(MistralConfig(**(LLAMA | {"sliding_window": WINDOW} | changes)))


def qwen2(**changes: Any) -> PreTrainedModel:
    return tiny(Qwen2Config(**(LLAMA | changes)))


def qwen3(**changes: Any) -> PreTrainedModel:
    return tiny(Qwen3Config(**(LLAMA | {"head_dim": 14} | changes)))


def gemma(**changes: Any) -> PreTrainedModel:
    return tiny(GemmaConfig(**(LLAMA | {"head_dim": 14} | changes)))


def gemma2(**changes: Any) -> PreTrainedModel:
    shape = {"head_dim": 14, "query_pre_attn_scalar": 9, "sliding_window": WINDOW}
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return tiny(Gemma2Config(**(LLAMA | shape | caps | changes)))


def gemma3(**changes: Any) -> PreTrainedModel:
    shape = {"head_dim": 14, "query_pre_attn_scalar": 9, "sliding_window": WINDOW, "sliding_window_pattern": 2}
    return tiny(Gemma3TextConfig(**(LLAMA | shape | changes)))


def phi3(**changes: Any) -> PreTrainedModel:
    return tiny(Phi3Config(**(LLAMA | {"pad_token_id": 0, "eos_token_id": 2} | changes)))


def longrope(original: int, **changes: Any) -> PreTrainedModel:
    factors = {"short_factor": [1.0, 1.2, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 9.0, 20.0, 40.0]}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
    sizes = {"max_position_embeddings": 512, "original_max_position_embeddings": original}
    return phi3(**sizes, rope_parameters=scaling, **changes)


def gpt2(**changes: Any) -> PreTrainedModel:
    shape = {"vocab_size": 131, "n_embd": 60, "n_layer": 3, "n_head": 5, "n_positions": 128, "initializer_range": 0.3}
    return tiny(GPT2Config(**(shape | {"bos_token_id": 1, "eos_token_id": 2} | changes)))


def mixtral(**changes: Any) -> PreTrainedModel:
    return tiny(MixtralConfig(**(LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2} | changes)))


def qwen3_moe(**changes: Any) -> PreTrainedModel:
    shape = {"head_dim": 14, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 31}
    return tiny(Qwen3MoeConfig(**(LLAMA | shape | changes)))


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
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma2, no caps": lambda: gemma2(attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True),
    "gemma3": gemma3,
    "gemma3, stretched": lambda: gemma3(
        final_logit_softcapping=3.0, rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=500.0
    ),
    "phi3": lambda: phi3(sliding_window=WINDOW),
    "phi3, part of each head": lambda: phi3(partial_rotary_factor=0.6, head_dim=10, tie_word_embeddings=True),
    "phi3, short contexts": lambda: longrope(128),  # the tests have no longer ones
    "gpt2": gpt2,
    "gpt2, untied, relu": lambda: gpt2(
        tie_word_embeddings=False, activation_function="relu", n_inner=70, scale_attn_weights=False
    ),
    "mixtral": mixtral,
    "mixtral, window": lambda: mixtral(sliding_window=WINDOW, num_experts_per_tok=1),
    "qwen3_moe": qwen3_moe,
    "qwen3_moe, some dense": lambda: qwen3_moe(
        mlp_only_layers=[0], norm_topk_prob=True, attention_bias=True, use_sliding_window=True, sliding_window=WINDOW
    ),
    "qwen3_moe, every other": lambda: qwen3_moe(decoder_sparse_step=2, num_experts_per_tok=1),
}

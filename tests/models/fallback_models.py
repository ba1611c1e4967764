"""Tiny random models of architectures without a family of Quire's own, each with a feature that others lack."""

from collections.abc import Callable
from typing import Any

from transformers import (
    Cohere2Config,
    DeepseekV3Config,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    Olmo2Config,
    PreTrainedModel,
    StableLmConfig,
    Starcoder2Config,
    VaultGemmaConfig,
)

from tests.models.tiny_models import tiny

SIZES: dict[str, Any] = {
    "vocab_size": 263,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # with the default, tiny models hardly depend on their context
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GROUPED = SIZES | {"num_key_value_heads": 2}


def stablelm(**changes: Any) -> PreTrainedModel:
    """Return a model with layer norms, and rotary positions on a part of each head."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return tiny(StableLmConfig(**(GROUPED | {"use_qkv_bias": True, "rope_parameters": rope} | changes)))


def gpt_neox(**changes: Any) -> PreTrainedModel:
    """Return a model with attention and MLP in parallel, one matmul for q, k and v, and a head with another name."""
    return tiny(GPTNeoXConfig(**(SIZES | changes)))


def cohere2(**changes: Any) -> PreTrainedModel:
    """Return a model with scaled logits, a window in some layers and no positions in the others."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    extra = {"sliding_window": 7, "layer_types": kinds, "logit_scale": 0.25, "head_dim": 12}
    return tiny(Cohere2Config(**(GROUPED | extra | changes)))


def olmo2(**changes: Any) -> PreTrainedModel:
    """Return a model with norms after the blocks, and over whole queries and keys."""
    return tiny(Olmo2Config(**(GROUPED | changes)))


def granite(**changes: Any) -> PreTrainedModel:
    """Return a model with multipliers on embeddings, residuals, attention and logits."""
    extra = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.4,
        "logits_scaling": 2.0,
    }
    return tiny(GraniteConfig(**(GROUPED | extra | changes)))


def starcoder2(**changes: Any) -> PreTrainedModel:
    """Return a model with a window in all layers, a head that is the token table, and biases everywhere."""
    return tiny(Starcoder2Config(**(GROUPED | {"sliding_window": 9} | changes)))


def deepseek_v3(**changes: Any) -> PreTrainedModel:
    """Return a model with latent attention, whose values are narrower than its keys, and routed experts."""
    extra = {
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    }  # fmt: skip
    return tiny(DeepseekV3Config(**(SIZES | extra | changes)))


def vault_gemma(**changes: Any) -> PreTrainedModel:
    """Return a model with capped scores and capped logits, and a window in every other layer."""
    extra = {"head_dim": 12, "sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    return tiny(VaultGemmaConfig(**(GROUPED | extra | changes)))


def gemma4(**changes: Any) -> PreTrainedModel:
    """Return a model with layers that differ in the number and width of heads."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    extra = {
        "head_dim": 12, "global_head_dim": 20, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "sliding_window": 8, "layer_types": kinds, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    }  # fmt: skip
    return tiny(Gemma4TextConfig(**(GROUPED | extra | {"pad_token_id": 0} | changes)))


MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    make.__name__: make
    for make in (stablelm, gpt_neox, cohere2, olmo2, granite, starcoder2, deepseek_v3, vault_gemma, gemma4)
}

"""Builds config.json, with the fields of transformers' config classes, from a GGUF file's metadata.

There is one function per architecture. It adds the constants of the architecture, which the metadata leaves out. A
metadata key that would change what the model computes, and is not handled here, is refused.
"""

from collections.abc import Callable
from typing import Any

from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, Keys, RopeScalingType

from shared.errors import ModelError
from shared.gguf.header import Header
from shared.gguf.metadata import MetadataReader

_TOKENS = {"bos": Keys.Tokenizer.BOS_ID, "eos": Keys.Tokenizer.EOS_ID, "pad": Keys.Tokenizer.PAD_ID}

_UNSUPPORTED = (
    Keys.LLM.LOGIT_SCALE,
    Keys.LLM.EMBEDDING_SCALE,
    Keys.LLM.RESIDUAL_SCALE,
    Keys.Attention.SCALE,
    Keys.Attention.CLAMP_KQV,
    Keys.Attention.MAX_ALIBI_BIAS,
)
"""Metadata keys that none of the architectures here has."""


def model_config(header: Header) -> dict[str, Any]:
    """Return the config.json of the model. Raise `ModelError` if its architecture or a key is not supported."""
    meta = MetadataReader(header)
    if meta.architecture not in _CONFIGS:
        name = meta.architecture[:64] or "none named"
        name = name if name.isprintable() else repr(name)
        raise ModelError(f"{meta.path}: architecture {name} is not supported (supported: {', '.join(_CONFIGS)})")
    layers = meta.positive(Keys.LLM.BLOCK_COUNT, int)
    if layers > len(header.tensors):
        raise ModelError(f"{meta.path}: it has {len(header.tensors)} tensors, which cannot be {layers} layers")
    for key in _UNSUPPORTED:
        if meta.has(key):
            raise ModelError(f"{meta.path}: {meta.name(key)} is not supported")
    size = meta.vocab_size()
    # null if the file names no such token: without the field, a config class would use a default id
    ids = {f"{role}_token_id": meta.values.get(key) for role, key in _TOKENS.items()}
    tokens = {name: id if id is not None and 0 <= id < size else None for name, id in ids.items()}
    return {
        "vocab_size": size,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "bfloat16",
        **tokens,
        **_CONFIGS[meta.architecture](meta),
    }


def _decoder(meta: MetadataReader, rope: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields that all architectures but GPT-2 have. `rope` replaces the usual rope_parameters."""
    heads = meta.positive(Keys.Attention.HEAD_COUNT, int)
    return {
        "hidden_size": meta.positive(Keys.LLM.EMBEDDING_LENGTH, int),
        "intermediate_size": meta.positive(Keys.LLM.FEED_FORWARD_LENGTH, int),
        "num_hidden_layers": meta.positive(Keys.LLM.BLOCK_COUNT, int),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.positive(Keys.Attention.HEAD_COUNT_KV, int, heads),
        "head_dim": meta.head_dim(),
        "max_position_embeddings": meta.positive(Keys.LLM.CONTEXT_LENGTH, int),
        "rms_norm_eps": meta.get(Keys.Attention.LAYERNORM_RMS_EPS, float),
        "hidden_act": "silu",
        "rope_parameters": rope or _rope(meta, meta.head_dim()),
    }


def _rope(meta: MetadataReader, dim: int) -> dict[str, Any]:
    """Return the rope_parameters of a model that rotates all dimensions of a head."""
    if (rotated := meta.get(Keys.Rope.DIMENSION_COUNT, int, dim)) != dim:
        raise ModelError(f"{meta.path}: {meta.name(Keys.Rope.DIMENSION_COUNT)} {rotated} is not the head's {dim}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": meta.positive(Keys.Rope.FREQ_BASE, float, 10000.0)}
    factors = meta.rope_factors("rope_freqs.weight", dim)
    scaling = meta.rope_scaling()
    if factors is not None:
        rope |= {"rope_type": "factors", "factors": factors}
    if scaling == RopeScalingType.NONE.value:
        return rope
    if factors is not None or scaling not in (RopeScalingType.LINEAR.value, RopeScalingType.YARN.value):
        beside = " beside rope_freqs.weight" if factors is not None else ""
        raise ModelError(f"{meta.path}: {meta.name(Keys.Rope.SCALING_TYPE)} {scaling!r}{beside} is not supported")
    rope |= {"rope_type": scaling, "factor": meta.positive(Keys.Rope.SCALING_FACTOR, float)}
    if scaling == RopeScalingType.YARN.value:
        rope["original_max_position_embeddings"] = meta.positive(Keys.Rope.SCALING_ORIG_CTX_LEN, int)
        for name, key in (
            ("attention_factor", Keys.Rope.SCALING_YARN_ATTN_FACTOR),
            ("beta_fast", Keys.Rope.SCALING_YARN_BETA_FAST),
            ("beta_slow", Keys.Rope.SCALING_YARN_BETA_SLOW),
        ):
            if meta.has(key):
                rope[name] = meta.get(key, float)
    return rope


def _llama(meta: MetadataReader) -> dict[str, Any]:
    """Return the config of Llama, Mistral (the same architecture) or Mixtral."""
    if experts := meta.num_experts():
        used = meta.experts_per_token(experts)
        mixture = {"num_local_experts": experts, "num_experts_per_tok": used, "sliding_window": None}
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"} | _decoder(meta) | mixture
    biases = {
        "attention_bias": "blk.0.attn_q.bias" in meta.header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in meta.header.tensors,
    }
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | _decoder(meta) | biases


def _qwen2(meta: MetadataReader) -> dict[str, Any]:
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    return config | _decoder(meta)


def _qwen3(meta: MetadataReader) -> dict[str, Any]:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}
    return config | _decoder(meta) | {"attention_bias": False}


def _qwen3_moe(meta: MetadataReader) -> dict[str, Any]:
    experts = meta.num_experts()
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": meta.experts_per_token(experts),
        "moe_intermediate_size": meta.positive(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, int),
        "norm_topk_prob": True,  # in all models of this architecture
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    }
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | _decoder(meta) | mixture


def _gemma(meta: MetadataReader) -> dict[str, Any]:
    activation = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    return {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"} | _decoder(meta) | activation


def _gemma2(meta: MetadataReader) -> dict[str, Any]:
    config = _gemma(meta)
    layers = config["num_hidden_layers"]
    return config | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=46),
        "attn_logit_softcapping": meta.positive(Keys.LLM.ATTN_LOGIT_SOFTCAPPING, float, 50.0),
        "final_logit_softcapping": meta.positive(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, float, 30.0),
        "sliding_window": meta.positive(Keys.Attention.SLIDING_WINDOW, int, 4096),
        "layer_types": _alternating(layers, 2),
    }


def _gemma3(meta: MetadataReader) -> dict[str, Any]:
    config = _gemma(meta)
    layers = config["num_hidden_layers"]
    full = config["rope_parameters"]
    if not meta.has(Keys.Rope.FREQ_BASE):
        full["rope_theta"] = 1000000.0
    local = {"rope_type": "default", "rope_theta": meta.positive(Keys.Rope.FREQ_BASE_SWA, float, 10000.0)}
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": meta.positive(Keys.Attention.SLIDING_WINDOW, int),
        "layer_types": _alternating(layers, 6),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _query_scalar(config: dict[str, Any], layers_of_27b: int) -> int:
    """Return query_pre_attn_scalar, which has no key: head_dim, except in the 27B, known by its layers."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _alternating(layers: int, period: int) -> list[str]:
    """Return the types of layers: full attention in the last of each `period` layers, a window in the others."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def _phi3(meta: MetadataReader) -> dict[str, Any]:
    dim = meta.head_dim()
    rotated = meta.positive(Keys.Rope.DIMENSION_COUNT, int, dim)
    if rotated > dim or rotated % 2:
        name = meta.name(Keys.Rope.DIMENSION_COUNT)
        raise ModelError(f"{meta.path}: {name} {rotated} must be even and at most the head's {dim}")
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": meta.positive(Keys.Rope.FREQ_BASE, float, 10000.0),
        "partial_rotary_factor": rotated / dim,
    }
    original = meta.positive(Keys.Rope.SCALING_ORIG_CTX_LEN, int, meta.positive(Keys.LLM.CONTEXT_LENGTH, int))
    short, long = (meta.rope_factors(f"rope_factors_{which}.weight", rotated) for which in ("short", "long"))
    if (short is None) != (long is None):
        present, missing = ("short", "long") if long is None else ("long", "short")
        raise ModelError(
            f"{meta.path}: tensor rope_factors_{missing}.weight is missing, and there is rope_factors_{present}.weight"
        )
    scaling = meta.rope_scaling()
    if scaling not in (RopeScalingType.NONE.value, RopeScalingType.LONGROPE.value):
        raise ModelError(f"{meta.path}: {meta.name(Keys.Rope.SCALING_TYPE)} {scaling!r} is not supported")
    if scaling == RopeScalingType.LONGROPE.value and short is None:
        raise ModelError(f"{meta.path}: tensor rope_factors_short.weight is missing, for {scaling!r} scaling")
    if short is not None:
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["original_max_position_embeddings"] = original
        if meta.has(Keys.Rope.SCALING_ATTN_FACTOR):
            rope["attention_factor"] = meta.positive(Keys.Rope.SCALING_ATTN_FACTOR, float)
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": original,
        "sliding_window": meta.get(Keys.Attention.SLIDING_WINDOW, int, 0) or None,
        "partial_rotary_factor": rotated / dim,
        **_decoder(meta, rope),
    }


def _gpt2(meta: MetadataReader) -> dict[str, Any]:
    hidden, heads = meta.positive(Keys.LLM.EMBEDDING_LENGTH, int), meta.positive(Keys.Attention.HEAD_COUNT, int)
    if hidden % heads:
        name = meta.name(Keys.Attention.HEAD_COUNT)
        raise ModelError(f"{meta.path}: {name} {heads} does not divide the hidden size {hidden}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_inner": meta.positive(Keys.LLM.FEED_FORWARD_LENGTH, int, 4 * hidden),
        "n_layer": meta.positive(Keys.LLM.BLOCK_COUNT, int),
        "n_head": heads,
        "n_positions": meta.positive(Keys.LLM.CONTEXT_LENGTH, int),
        "layer_norm_epsilon": meta.get(Keys.Attention.LAYERNORM_EPS, float),
        "activation_function": "gelu_new",
    }


def _name(architecture: MODEL_ARCH) -> str:
    return str(MODEL_ARCH_NAMES[architecture])


_CONFIGS: dict[str, Callable[[MetadataReader], dict[str, Any]]] = {
    _name(MODEL_ARCH.LLAMA): _llama,
    _name(MODEL_ARCH.QWEN2): _qwen2,
    _name(MODEL_ARCH.QWEN3): _qwen3,
    _name(MODEL_ARCH.QWEN3MOE): _qwen3_moe,
    _name(MODEL_ARCH.GEMMA): _gemma,
    _name(MODEL_ARCH.GEMMA2): _gemma2,
    _name(MODEL_ARCH.GEMMA3): _gemma3,
    _name(MODEL_ARCH.PHI3): _phi3,
    _name(MODEL_ARCH.GPT2): _gpt2,
}

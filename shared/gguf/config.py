"""config.json from a GGUF file's metadata, in the words of transformers' config classes.

One function an architecture. What the metadata leaves out, because the programs that read GGUF know it of the
architecture, is added here. What would make the model compute differently and has no place here is refused by name.
"""

from collections.abc import Callable
from typing import Any

from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, Keys, RopeScalingType

from shared.errors import ModelError
from shared.gguf.header import Header
from shared.gguf.settings import Source

_TOKENS = {"bos": Keys.Tokenizer.BOS_ID, "eos": Keys.Tokenizer.EOS_ID, "pad": Keys.Tokenizer.PAD_ID}

_FOREIGN = (
    Keys.LLM.LOGIT_SCALE,
    Keys.LLM.EMBEDDING_SCALE,
    Keys.LLM.RESIDUAL_SCALE,
    Keys.Attention.SCALE,
    Keys.Attention.CLAMP_KQV,
    Keys.Attention.MAX_ALIBI_BIAS,
)
"""Settings that none of the architectures here has."""


def model_config(header: Header) -> dict[str, Any]:
    """The config.json of the model. Raises `ModelError` for an architecture or a setting that is not supported."""
    source = Source(header)
    if source.architecture not in _CONFIGS:
        asked = source.architecture[:64] or "none named"
        asked = asked if asked.isprintable() else repr(asked)
        raise ModelError(f"{source.path}: architecture {asked} is not supported (supported: {', '.join(_CONFIGS)})")
    layers = source.positive(Keys.LLM.BLOCK_COUNT, int)
    if layers > len(header.tensors):
        raise ModelError(f"{source.path}: it has {len(header.tensors)} tensors, which cannot be {layers} layers")
    for key in _FOREIGN:
        if source.has(key):
            raise ModelError(f"{source.path}: {source.name(key)} is not supported")
    size = source.vocab_size()
    # null where the file names none that there is: left out, a config class would have an id of its own
    ids = {f"{part}_token_id": source.metadata.get(key) for part, key in _TOKENS.items()}
    tokens = {name: id if id is not None and 0 <= id < size else None for name, id in ids.items()}
    return {
        "vocab_size": size,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "bfloat16",
        **tokens,
        **_CONFIGS[source.architecture](source),
    }


def _decoder(source: Source, rope: dict[str, Any] | None = None) -> dict[str, Any]:
    """What all but GPT-2 have; rotary positions as `rope` has them, or as the file says in the usual way."""
    heads = source.positive(Keys.Attention.HEAD_COUNT, int)
    return {
        "hidden_size": source.positive(Keys.LLM.EMBEDDING_LENGTH, int),
        "intermediate_size": source.positive(Keys.LLM.FEED_FORWARD_LENGTH, int),
        "num_hidden_layers": source.positive(Keys.LLM.BLOCK_COUNT, int),
        "num_attention_heads": heads,
        "num_key_value_heads": source.positive(Keys.Attention.HEAD_COUNT_KV, int, heads),
        "head_dim": source.head_dim(),
        "max_position_embeddings": source.positive(Keys.LLM.CONTEXT_LENGTH, int),
        "rms_norm_eps": source.get(Keys.Attention.LAYERNORM_RMS_EPS, float),
        "hidden_act": "silu",
        "rope_parameters": rope or _rope(source, source.head_dim()),
    }


def _rope(source: Source, dim: int) -> dict[str, Any]:
    """Of a model that turns all dimensions of a head."""
    if (rotated := source.get(Keys.Rope.DIMENSION_COUNT, int, dim)) != dim:
        raise ModelError(f"{source.path}: {source.name(Keys.Rope.DIMENSION_COUNT)} {rotated} is not the head's {dim}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": source.positive(Keys.Rope.FREQ_BASE, float, 10000.0)}
    factors = source.factors("rope_freqs.weight", dim)
    kind = source.scaling()
    if factors is not None:
        rope |= {"rope_type": "factors", "factors": factors}
    if kind == RopeScalingType.NONE.value:
        return rope
    if factors is not None or kind not in (RopeScalingType.LINEAR.value, RopeScalingType.YARN.value):
        beside = " beside rope_freqs.weight" if factors is not None else ""
        raise ModelError(f"{source.path}: {source.name(Keys.Rope.SCALING_TYPE)} {kind!r}{beside} is not supported")
    rope |= {"rope_type": kind, "factor": source.positive(Keys.Rope.SCALING_FACTOR, float)}
    if kind == RopeScalingType.YARN.value:
        rope["original_max_position_embeddings"] = source.positive(Keys.Rope.SCALING_ORIG_CTX_LEN, int)
        for name, key in (
            ("attention_factor", Keys.Rope.SCALING_YARN_ATTN_FACTOR),
            ("beta_fast", Keys.Rope.SCALING_YARN_BETA_FAST),
            ("beta_slow", Keys.Rope.SCALING_YARN_BETA_SLOW),
        ):
            if source.has(key):
                rope[name] = source.get(key, float)
    return rope


def _llama(source: Source) -> dict[str, Any]:
    """Also Mistral, which computes the same, and Mixtral."""
    if experts := source.experts():
        used = source.experts_used(experts)
        mixture = {"num_local_experts": experts, "num_experts_per_tok": used, "sliding_window": None}
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"} | _decoder(source) | mixture
    biases = {
        "attention_bias": "blk.0.attn_q.bias" in source.header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in source.header.tensors,
    }
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | _decoder(source) | biases


def _qwen2(source: Source) -> dict[str, Any]:
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    return config | _decoder(source)


def _qwen3(source: Source) -> dict[str, Any]:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}
    return config | _decoder(source) | {"attention_bias": False}


def _qwen3_moe(source: Source) -> dict[str, Any]:
    experts = source.experts()
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": source.experts_used(experts),
        "moe_intermediate_size": source.positive(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, int),
        "norm_topk_prob": True,  # as all of them are computed that are kept in this format
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    }
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | _decoder(source) | mixture


def _gemma(source: Source) -> dict[str, Any]:
    activation = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    return {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"} | _decoder(source) | activation


def _gemma2(source: Source) -> dict[str, Any]:
    config = _gemma(source)
    layers = config["num_hidden_layers"]
    return config | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "query_pre_attn_scalar": _query_scalar(config, widest=46),
        "attn_logit_softcapping": source.positive(Keys.LLM.ATTN_LOGIT_SOFTCAPPING, float, 50.0),
        "final_logit_softcapping": source.positive(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, float, 30.0),
        "sliding_window": source.positive(Keys.Attention.SLIDING_WINDOW, int, 4096),
        "layer_types": _alternating(layers, 2),
    }


def _gemma3(source: Source) -> dict[str, Any]:
    config = _gemma(source)
    layers = config["num_hidden_layers"]
    full = config["rope_parameters"]
    if not source.has(Keys.Rope.FREQ_BASE):
        full["rope_theta"] = 1000000.0
    local = {"rope_type": "default", "rope_theta": source.positive(Keys.Rope.FREQ_BASE_SWA, float, 10000.0)}
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _query_scalar(config, widest=62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": source.positive(Keys.Attention.SLIDING_WINDOW, int),
        "layer_types": _alternating(layers, 6),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _query_scalar(config: dict[str, Any], widest: int) -> int:
    """What scores are scaled by, which no key tells: of the 27B, known by its layers, it is not the head's size."""
    if config["num_hidden_layers"] == widest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _alternating(layers: int, period: int) -> list[str]:
    """Each last layer of a period sees everything, the others a window."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def _phi3(source: Source) -> dict[str, Any]:
    dim = source.head_dim()
    rotated = source.positive(Keys.Rope.DIMENSION_COUNT, int, dim)
    if rotated > dim or rotated % 2:
        name = source.name(Keys.Rope.DIMENSION_COUNT)
        raise ModelError(f"{source.path}: {name} {rotated} must be even and at most the head's {dim}")
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": source.positive(Keys.Rope.FREQ_BASE, float, 10000.0),
        "partial_rotary_factor": rotated / dim,
    }
    original = source.positive(Keys.Rope.SCALING_ORIG_CTX_LEN, int, source.positive(Keys.LLM.CONTEXT_LENGTH, int))
    short, long = (source.factors(f"rope_factors_{which}.weight", rotated) for which in ("short", "long"))
    if (short is None) != (long is None):
        there, missing = ("short", "long") if long is None else ("long", "short")
        raise ModelError(
            f"{source.path}: tensor rope_factors_{missing}.weight is missing, and there is rope_factors_{there}.weight"
        )
    kind = source.scaling()
    if kind not in (RopeScalingType.NONE.value, RopeScalingType.LONGROPE.value):
        raise ModelError(f"{source.path}: {source.name(Keys.Rope.SCALING_TYPE)} {kind!r} is not supported")
    if kind == RopeScalingType.LONGROPE.value and short is None:
        raise ModelError(f"{source.path}: tensor rope_factors_short.weight is missing, for {kind!r} scaling")
    if short is not None:
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["original_max_position_embeddings"] = original
        if source.has(Keys.Rope.SCALING_ATTN_FACTOR):
            rope["attention_factor"] = source.positive(Keys.Rope.SCALING_ATTN_FACTOR, float)
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": original,
        "sliding_window": source.get(Keys.Attention.SLIDING_WINDOW, int, 0) or None,
        "partial_rotary_factor": rotated / dim,
        **_decoder(source, rope),
    }


def _gpt2(source: Source) -> dict[str, Any]:
    hidden, heads = source.positive(Keys.LLM.EMBEDDING_LENGTH, int), source.positive(Keys.Attention.HEAD_COUNT, int)
    if hidden % heads:
        name = source.name(Keys.Attention.HEAD_COUNT)
        raise ModelError(f"{source.path}: {name} {heads} does not divide the hidden size {hidden}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_inner": source.positive(Keys.LLM.FEED_FORWARD_LENGTH, int, 4 * hidden),
        "n_layer": source.positive(Keys.LLM.BLOCK_COUNT, int),
        "n_head": heads,
        "n_positions": source.positive(Keys.LLM.CONTEXT_LENGTH, int),
        "layer_norm_epsilon": source.get(Keys.Attention.LAYERNORM_EPS, float),
        "activation_function": "gelu_new",
    }


def _named(architecture: MODEL_ARCH) -> str:
    return str(MODEL_ARCH_NAMES[architecture])


_CONFIGS: dict[str, Callable[[Source], dict[str, Any]]] = {
    _named(MODEL_ARCH.LLAMA): _llama,
    _named(MODEL_ARCH.QWEN2): _qwen2,
    _named(MODEL_ARCH.QWEN3): _qwen3,
    _named(MODEL_ARCH.QWEN3MOE): _qwen3_moe,
    _named(MODEL_ARCH.GEMMA): _gemma,
    _named(MODEL_ARCH.GEMMA2): _gemma2,
    _named(MODEL_ARCH.GEMMA3): _gemma3,
    _named(MODEL_ARCH.PHI3): _phi3,
    _named(MODEL_ARCH.GPT2): _gpt2,
}

"""The shapes of a model's tensors by their Hugging Face names, computed from config.json.

There is one function per architecture. It lists exactly the tensors that the model needs, so that a tensor that is
missing, superfluous or of another shape is found before any weight is read.
"""

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


def llama(config: Config) -> Shapes:
    """Return the shapes of Llama, Mistral, Qwen 2 and Gemma: attention and gated MLP, each after a norm."""
    hidden = config["hidden_size"]
    layer: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    return _decoder(config, layer | _attention(config) | _gated_mlp(config))


def mixtral(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    experts, inner = config["num_local_experts"], config["intermediate_size"]
    layer: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    layer |= {"block_sparse_moe.gate.weight": (experts, hidden)}
    for expert in range(experts):
        prefix = f"block_sparse_moe.experts.{expert}"
        layer |= {f"{prefix}.w1.weight": (inner, hidden), f"{prefix}.w3.weight": (inner, hidden)}
        layer |= {f"{prefix}.w2.weight": (hidden, inner)}
    return _decoder(config, layer | _attention(config))


def qwen3_moe(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    experts, inner = config["num_experts"], config["moe_intermediate_size"]
    layer: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    layer |= {"mlp.gate.weight": (experts, hidden)}
    for expert in range(experts):
        prefix = f"mlp.experts.{expert}"
        layer |= {f"{prefix}.gate_proj.weight": (inner, hidden), f"{prefix}.up_proj.weight": (inner, hidden)}
        layer |= {f"{prefix}.down_proj.weight": (hidden, inner)}
    return _decoder(config, layer | _attention(config) | _head_norms(config))


def qwen3(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    layer: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    return _decoder(config, layer | _attention(config) | _head_norms(config) | _gated_mlp(config))


def gemma2(config: Config) -> Shapes:
    """Return the shapes of Gemma 2, which has norms before and after both attention and MLP."""
    return _decoder(config, _four_norms(config) | _attention(config) | _gated_mlp(config))


def gemma3(config: Config) -> Shapes:
    return _decoder(config, _four_norms(config) | _attention(config) | _head_norms(config) | _gated_mlp(config))


def phi3(config: Config) -> Shapes:
    """Return the shapes of Phi-3, which has one matrix for qkv, and one for gate and up."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], _head_dim(config)
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.qkv_proj.weight": (q_size + 2 * kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_up_proj.weight": (2 * inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return _decoder(config, layer)


def gpt2(config: Config) -> Shapes:
    """Return the shapes of GPT-2, whose matrices are (inputs, outputs)."""
    hidden, inner = config["n_embd"], config["n_inner"]
    layer: Shapes = {}
    for norm in ("ln_1", "ln_2"):
        layer |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
    for name, inputs, outputs in (
        ("attn.c_attn", hidden, 3 * hidden),
        ("attn.c_proj", hidden, hidden),
        ("mlp.c_fc", hidden, inner),
        ("mlp.c_proj", inner, hidden),
    ):
        layer |= {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}
    shapes: Shapes = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
        "transformer.ln_f.weight": (hidden,),
        "transformer.ln_f.bias": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index in range(config["n_layer"]):
        shapes |= {f"transformer.h.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


SHAPES: dict[str, Callable[[Config], Shapes]] = {
    "LlamaForCausalLM": llama,
    "MixtralForCausalLM": mixtral,
    "Qwen2ForCausalLM": llama,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "GemmaForCausalLM": llama,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Phi3ForCausalLM": phi3,
    "GPT2LMHeadModel": gpt2,
}


def _decoder(config: Config, layer: Shapes) -> Shapes:
    """Return the shapes of a model whose layers all have the shapes `layer`."""
    vocab_size, hidden = config["vocab_size"], config["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab_size, hidden)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention(config: Config) -> Shapes:
    hidden, dim = config["hidden_size"], _head_dim(config)
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    biases = {"q_proj", "k_proj", "v_proj"} if config["model_type"] == "qwen2" else set()
    if config.get("attention_bias"):
        biases = {"q_proj", "k_proj", "v_proj", "o_proj"}
    shapes: Shapes = {}
    for name, outputs, inputs in (
        ("q_proj", q_size, hidden),
        ("k_proj", kv_size, hidden),
        ("v_proj", kv_size, hidden),
        ("o_proj", hidden, q_size),
    ):
        shapes[f"self_attn.{name}.weight"] = (outputs, inputs)
        if name in biases:
            shapes[f"self_attn.{name}.bias"] = (outputs,)
    return shapes


def _gated_mlp(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {}
    for name, outputs, inputs in (
        ("gate_proj", inner, hidden),
        ("up_proj", inner, hidden),
        ("down_proj", hidden, inner),
    ):
        shapes[f"mlp.{name}.weight"] = (outputs, inputs)
        if config.get("mlp_bias"):
            shapes[f"mlp.{name}.bias"] = (outputs,)
    return shapes


def _head_norms(config: Config) -> Shapes:
    dim = _head_dim(config)
    return {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}


def _four_norms(config: Config) -> Shapes:
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return {f"{name}_layernorm.weight": (config["hidden_size"],) for name in names}


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])

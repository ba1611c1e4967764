"""Turns a GGUF file of a llama-like model into a Hugging Face folder that any loader of those reads.

GGUF keeps everything in one file: settings, tokenizer, chat template and quantised weights. `write_folder` takes them
apart. It knows the `llama` architecture and byte-level BPE tokenizers with the `smollm` rule of splitting text, and
refuses others rather than guessing. Weights are dequantised and rounded to bfloat16. Nothing here imports torch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.errors import ModelError
from shared.progress import progress

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Fields = dict[str, Any]


def write_folder(source: Path, folder: Path, sampling: Mapping[str, Any]) -> None:
    """Write the model in the GGUF file `source` into the existing `folder`, and tell stderr of the progress.

    GGUF says nothing of how the model likes to be sampled; `sampling` goes into generation_config.json.
    Raises `ModelError` for a file of another architecture or tokenizer.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _check(fields, "general.architecture", "llama")
    _check(fields, "tokenizer.ggml.model", "gpt2")
    _check(fields, "tokenizer.ggml.pre", "smollm")
    names = {tensor.name for tensor in reader.tensors}
    _write_json(folder / "config.json", model_config(fields, tied="output.weight" not in names))
    _write_json(folder / "generation_config.json", {**_token_ids(fields), **sampling})
    _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    weights = dict(_weights(reader, fields))
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in weights.items()  # which stay alive until they are written: a spec holds a bare address
    }
    serialize_file(specs, str(folder / "model.safetensors"), {"format": "pt"})


def model_config(fields: Fields, *, tied: bool) -> Fields:
    """config.json of a llama model."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "max_position_embeddings": fields["llama.context_length"],
        # the file keeps it as a float32, of which 9.999999747378752e-06 is what remains of 1e-05
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **_token_ids(fields),
    }


def tokenizer_config(fields: Fields) -> Fields:
    """tokenizer_config.json: the chat template, and which special token plays which part."""
    tokens = fields["tokenizer.ggml.tokens"]
    config: Fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": fields.get("tokenizer.ggml.add_bos_token", False),
    }
    for part, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{part}_token"] = tokens[token]
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def build_tokenizer(fields: Fields) -> Tokenizer:
    """Byte-level BPE that reads numbers digit by digit, with the file's special tokens."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _weights(reader: GGUFReader, fields: Fields) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    heads = fields["llama.attention.head_count"]
    rotary = {"attn_q": heads, "attn_k": fields.get("llama.attention.head_count_kv", heads)}
    total = sum(int(tensor.n_elements) * 2 for tensor in reader.tensors)
    with progress("converting the embedded model", total) as done:
        for tensor in reader.tensors:
            name, part = hugging_face_name(tensor.name)
            weight = dequantize(tensor.data, tensor.tensor_type)
            if part in rotary:
                weight = halves_from_pairs(weight, rotary[part])
            yield name, bfloat16_bits(weight)
            done(2 * weight.size)


def hugging_face_name(name: str) -> tuple[str, str]:
    """The tensor's name in a Hugging Face file, and GGUF's word for its part, such as `ffn_up`."""
    match name.split("."):
        case [part, "weight"] if part in TOP_NAMES:
            return f"{TOP_NAMES[part]}.weight", part
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", part
    raise ModelError(f"the GGUF file has a tensor {name}, which no llama model has")


def halves_from_pairs(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the output rows [heads * dim, in] of a rotated projection.

    GGUF turns neighbouring rows of a head (0, 1), (2, 3), ... together; Hugging Face turns row i with row i + dim / 2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def bfloat16_bits(weight: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The values rounded to bfloat16 (to nearest, ties to even), as their little-endian bits; all must be finite."""
    bits = np.ascontiguousarray(weight, dtype="<f4").view("<u4")
    rounded: NDArray[np.uint32] = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype("<u2", copy=False)


def _token_ids(fields: Fields) -> Fields:
    ids = {
        part: fields.get(f"tokenizer.ggml.{key}_token_id")
        for part, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {f"{part}_token_id": token for part, token in ids.items() if token is not None}


def _check(fields: Fields, name: str, expected: str) -> None:
    if fields.get(name) != expected:
        raise ModelError(f"the GGUF file's {name} is {fields.get(name)!r}; only {expected!r} can be converted")


def _write_json(path: Path, value: Fields) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""Writes GGUF files of tiny transformers models, as the usual converter does, with the `gguf` package's writer.

`write` puts the dequantised values back into the model, so that the model stays the reference for a quantised file.
"""

import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFEndian, GGUFWriter, RopeScalingType, quants
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFValueType
from gguf.tensor_mapping import get_tensor_name_map
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.gguf.random_blocks import random_blocks

TypeOf = Callable[[str], GGMLQuantizationType]
"""Maps GGUF's name of a matrix to the type that it is stored in."""

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma": MODEL_ARCH.GEMMA,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "phi3": MODEL_ARCH.PHI3,
    "gpt2": MODEL_ARCH.GPT2,
}


def as_float(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType.F32


def write(
    model: PreTrainedModel,
    path: Path,
    types: TypeOf = as_float,
    *,
    vocabulary: Mapping[str, Any] | None = None,
    others: Mapping[str, NDArray[Any] | None] = {},
    extra: Mapping[str, Any] = {},
    split: int = 0,
    endianness: GGUFEndian = GGUFEndian.LITTLE,
) -> Path:
    """Write `model` to `path`, and put the values that its quantised matrices have afterwards into `model`.

    `others` replaces tensors; None leaves one out. `extra` replaces metadata (numbers as 32-bit ones); None leaves a
    key out. `split` is the number of tensors per file; 0 writes one file.
    """
    writer = GGUFWriter(
        path, MODEL_ARCH_NAMES[ARCHITECTURES[model.config.model_type]], endianess=endianness, split_max_tensors=split
    )
    add_metadata(writer, model.config)
    add_vocabulary(writer, vocabulary if vocabulary is not None else plain_vocabulary(model.config.vocab_size))
    add_tensors(writer, model, types, others)
    for name, tensor in others.items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    replace_keys(writer, extra)
    return finish(writer, path)


def replace_keys(writer: GGUFWriter, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        writer.kv_data[0].pop(key, None)
        match value:
            case None:
                pass
            case int() if not isinstance(value, bool):
                writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
            case float():
                writer.add_float32(key, value)
            case _:
                writer.add_key_value(key, value, GGUFValueType.get_type(value))


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_key(content: bytes, name: str, value: bytes) -> bytes:
    """Return a file's content with one more key. `value` is its type and value as bytes, valid or not."""
    added = _string(name) + value
    filler = -(len(added) + len(_string("filler")) + 16) % 32  # tensors begin at whole 32 bytes
    nothing = struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.UINT8, filler) + bytes(filler)
    (keys,) = struct.unpack_from("<Q", content, 16)
    return content[:16] + struct.pack("<Q", keys + 2) + added + _string("filler") + nothing + content[24:]


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


EMPTY = struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.STRING, 0)
"""An array without elements, for `with_key`."""


def plain_vocabulary(size: int) -> dict[str, Any]:
    """Return a vocabulary of byte-level BPE (`gpt-2`) with one merge."""
    letters = [chr(33 + at) if at < 94 else f"[{at}]" for at in range(size - 1)] + ["zz"]
    return {"model": "gpt2", "pre": "gpt-2", "token_list": letters, "token_types": [1] * size, "token_merges": ["z z"]}


def add_vocabulary(writer: GGUFWriter, vocabulary: Mapping[str, Any]) -> None:
    """Add values by the names of the writer's methods: `model`, `pre`, `token_list`, `bos_token_id`, ..."""
    for name, value in vocabulary.items():
        prefixed = f"add_tokenizer_{name}"
        getattr(writer, prefixed if hasattr(writer, prefixed) else f"add_{name}")(value)


def add_metadata(writer: GGUFWriter, config: Any) -> None:
    """Add the metadata that the usual converter writes."""
    model_type = config.model_type
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.n_embd if model_type == "gpt2" else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if model_type == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if model_type.startswith(("gemma", "qwen3")):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None) and model_type != "mistral":
        writer.add_sliding_window(config.sliding_window)
    if model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_rope(writer, config)


def add_rope(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type in ("llama", "mistral", "mixtral"):
        writer.add_rope_dimension_count(config.head_dim or config.hidden_size // config.num_attention_heads)
    if config.model_type == "phi3":
        dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        if rope["rope_type"] == "longrope":
            for which in ("long", "short"):
                writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))
    elif rope["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
        dim = 2 * len(scaled)
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    elif rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_tensors(writer: GGUFWriter, model: PreTrainedModel, types: TypeOf, others: Collection[str] = ()) -> None:
    for name, stored, put_back in stored_tensors(model):
        if name in others:
            continue
        type = types(name) if stored.ndim > 1 else GGMLQuantizationType.F32
        written = blocks_of(stored, type)
        writer.add_tensor(name, written, raw_dtype=type)
        put_back(quants.dequantize(written.view(np.uint8) if written.dtype != np.uint8 else written, type))


def blocks_of(values: NDArray[np.float32], type: GGMLQuantizationType) -> NDArray[Any]:
    """Return values in a type, or blocks of random values of their size if the `gguf` package cannot quantise to it."""
    try:
        return quants.quantize(values, type)
    except NotImplementedError:
        random = np.random.default_rng(zlib.crc32(values.tobytes()))
        return random_blocks(type, values.shape, random, float(values.std())).reshape(*values.shape[:-1], -1)


def stored_tensors(
    model: PreTrainedModel,
) -> Iterator[tuple[str, NDArray[np.float32], Callable[[NDArray[np.float32]], None]]]:
    """Yield each tensor of the file: its name, its values, and a function that puts such values back into the model."""
    config, model_type = model.config, model.config.model_type
    names = get_tensor_name_map(ARCHITECTURES[model_type], config.num_hidden_layers)
    for full, parameter in model.named_parameters():
        if full.endswith(".experts.gate_up_proj"):
            half, layer = parameter.shape[1] // 2, full.split(".")[2]
            yield f"blk.{layer}.ffn_gate_exps.weight", *_unchanged(parameter[:, :half])
            yield f"blk.{layer}.ffn_up_exps.weight", *_unchanged(parameter[:, half:])
        elif full.endswith(".experts.down_proj"):
            yield f"blk.{full.split('.')[2]}.ffn_down_exps.weight", *_unchanged(parameter)
        else:
            name = names.get_name(full, try_suffixes=(".weight", ".bias"))
            assert name is not None, full
            yield name, *_converted(model_type, full, parameter, config)


def _unchanged(parameter: Tensor) -> tuple[NDArray[np.float32], Callable[[NDArray[np.float32]], None]]:
    def put_back(values: NDArray[np.float32]) -> None:
        parameter.data.copy_(torch.from_numpy(values.reshape(parameter.shape).copy()))

    return parameter.detach().float().contiguous().numpy().copy(), put_back


def _converted(model_type: str, name: str, parameter: Tensor, config: Any) -> Any:
    """Return the values as the converter stores them, and the function that puts them back."""
    if model_type in ("llama", "mistral", "mixtral") and (".q_proj" in name or ".k_proj" in name):
        heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
        rows = torch.arange(parameter.shape[0]).view(heads, 2, -1).transpose(1, 2).reshape(-1)
        values = parameter.detach()[rows].float().numpy()

        def put_back(values: NDArray[np.float32]) -> None:
            parameter.data[rows] = torch.from_numpy(values.reshape(parameter.shape).copy())

        return values, put_back
    if model_type.startswith("gemma") and name.endswith("norm.weight"):
        return parameter.detach().float().numpy() + 1, lambda values: None
    if model_type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return _unchanged(parameter.T)
    return _unchanged(parameter)

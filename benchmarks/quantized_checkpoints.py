"""Writes checkpoints of random quants, to measure how they load and compute.

    python -m benchmarks.quantized_checkpoints FOLDER --model 1b --layers 4 --formats gptq awq squeezellm Q8_0 Q4_K_M

Each goes into FOLDER/FORMAT, or FOLDER/FORMAT.gguf for GGUF. GPTQ and AWQ have 4 bits in groups of 128 inputs and an
embedding of floats, as most such checkpoints; `gptq-ordered` was quantised in the order of activations. SqueezeLLM has
tables, and `squeezellm-outliers` outliers too. In a GGUF file all matrices are of one type, or mixed as llama.cpp mixes
them in `Q4_K_M` and `Q5_K_M`. What they compute means nothing, but is finite.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType
from gguf.tensor_mapping import get_tensor_name_map
from numpy.typing import NDArray

from benchmarks.peers.models import MODELS, Shape
from benchmarks.peers.random_weights import DEVIATION, LAYERS_PER_FILE, Tensors, write_files
from benchmarks.quantized_matmuls import outliers
from kernels.table_weight import CODES_PER_WORD, TABLE_SIZE

GROUP_SIZE = 128

FLOATS = {"Q4_0": (0,), "Q4_1": (0, 1), "Q5_0": (0,), "Q5_1": (0, 1), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
FLOATS |= {"Q2_K": (-2, -1), "Q3_K": (-1,), "Q4_K": (0, 1), "Q5_K": (0, 1), "Q6_K": (-1,)}
"""The places of the scale and of the min, if there is one, in a block of each type, counted in float16 numbers."""

MIXED = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}
"""The type of most matrices of a mixed file. Some that matter more are in Q6_K."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=[key for key, model in MODELS.items() if model.shape], default="1b")
    parser.add_argument("--layers", type=int, help="how many of the model's layers; unset: all")
    formats = [*PACKED, *FLOATS, *MIXED]
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats)
    options = parser.parse_args()
    shape = MODELS[options.model].shape
    assert shape
    shape = shape._replace(layers=options.layers or shape.layers)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.formats:
        if name in PACKED:
            write_packed(shape, options.folder / name, PACKED[name])
        else:
            write_gguf(shape, options.folder / f"{name}.gguf", name)


class Packed(NamedTuple):
    """A format of checkpoints whose matrices are packed into several tensors each."""

    settings: dict[str, Any]  # `quantization_config` of config.json
    pack: Callable[[int, int, torch.Generator], Tensors]  # a random matrix of so many outputs and inputs


def write_packed(shape: Shape, folder: Path, format: Packed) -> None:
    """Write the folder of a checkpoint."""
    folder.mkdir(exist_ok=True)
    config = shape.config() | {"dtype": "float16", "quantization_config": format.settings}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_files(folder, _packed_files(shape, format, torch.Generator().manual_seed(0)))


def _packed_files(shape: Shape, format: Packed, random: torch.Generator) -> Iterator[Tensors]:
    yield {name: _floats(size, random) for name, size in shape.ends()}
    for first in range(0, shape.layers, LAYERS_PER_FILE):
        file: Tensors = {}
        for number in range(first, min(first + LAYERS_PER_FILE, shape.layers)):
            for name, size in shape.layer(number):
                if len(size) == 1:
                    file[name] = _floats(size, random)
                else:
                    module = name.removesuffix(".weight")
                    tensors = format.pack(size[0], size[1], random)
                    file |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
        yield file


def _gptq(outputs: int, inputs: int, random: torch.Generator, *, ordered: bool) -> Tensors:
    groups = inputs // GROUP_SIZE
    g_idx = torch.arange(inputs, dtype=torch.int32) // GROUP_SIZE
    if ordered:
        g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    zeros = torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32)  # 8 less 1 each: symmetric
    scales = _scales(groups, outputs, random)
    return {"qweight": _words(inputs // 8, outputs, random), "qzeros": zeros, "scales": scales, "g_idx": g_idx}


def _awq(outputs: int, inputs: int, random: torch.Generator) -> Tensors:
    groups = inputs // GROUP_SIZE
    return {
        "qweight": _words(inputs, outputs // 8, random),
        "qzeros": _words(groups, outputs // 8, random),
        "scales": _scales(groups, outputs, random),
    }


def _squeezellm(outputs: int, inputs: int, random: torch.Generator, *, sparse: bool) -> Tensors:
    tensors = {
        "qweight": _words(inputs // CODES_PER_WORD, outputs, random),
        "lookup_table": _floats((outputs, TABLE_SIZE), random),
    }
    if sparse:
        rows, columns, values = outliers(outputs, inputs, random)
        tensors |= {"rows": rows.int(), "cols": columns, "vals": values * DEVIATION}
    return tensors


def _words(rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns), generator=random).int()


def _scales(groups: int, outputs: int, random: torch.Generator) -> torch.Tensor:
    return torch.rand(groups, outputs, generator=random).half() * (DEVIATION / 4)


def _floats(size: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.float16)
    return torch.empty(size).normal_(0, DEVIATION, generator=random).half()


def type_in(format: str, name: str, layers: int) -> GGMLQuantizationType:
    """Return the type of the matrix that GGUF calls `name`, in a file of a type or mixture. The embedding is tied."""
    if format not in MIXED:
        return GGMLQuantizationType[format]
    parts = name.split(".")
    exact = name == "token_embd.weight"
    if parts[0] == "blk" and parts[2] in ("attn_v", "ffn_down", "ffn_down_exps"):
        number, eighth = int(parts[1]), layers // 8
        exact = number < eighth or number >= 7 * layers // 8 or (number - eighth) % 3 == 2
    return GGMLQuantizationType.Q6_K if exact else GGMLQuantizationType[MIXED[format]]


def write_gguf(shape: Shape, path: Path, format: str) -> None:
    """Write a GGUF file of a type or mixture."""
    writer = GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.config()["max_position_embeddings"])
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = [chr(33 + token) if token < 94 else f"[{token}]" for token in range(shape.vocabulary - 1)]
    writer.add_token_list([*letters, "zz"])
    writer.add_token_types([1] * shape.vocabulary)
    writer.add_token_merges(["z z"])
    names, random = get_tensor_name_map(MODEL_ARCH.LLAMA, shape.layers), np.random.default_rng(0)
    for name, size in (*shape.ends(), *(tensor for layer in range(shape.layers) for tensor in shape.layer(layer))):
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored
        if len(size) == 1:
            writer.add_tensor(stored, np.ones(size, np.float32))
        else:
            type = type_in(format, stored, shape.layers)
            writer.add_tensor(stored, _blocks(size[0], size[1], type, random), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(rows: int, columns: int, type: GGMLQuantizationType, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return random blocks (rows, bytes), whose floats are small and positive."""
    block, size = GGML_QUANT_SIZES[type]
    stored = random.integers(0, 256, (rows, columns // block * size), np.uint8)
    numbers = stored.view(np.float16).reshape(rows, -1, size // 2)
    for place in FLOATS[type.name]:
        numbers[..., place] = random.random(numbers.shape[:2], np.float32) * (DEVIATION / block)
    return stored


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "sym": True, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "zero_point": True, "version": "gemm"}
SQUEEZELLM = {"quant_method": "squeezellm", "wbits": 4}
PACKED = {
    "gptq": Packed(GPTQ | {"desc_act": False}, partial(_gptq, ordered=False)),
    "gptq-ordered": Packed(GPTQ | {"desc_act": True}, partial(_gptq, ordered=True)),
    "awq": Packed(AWQ, _awq),
    "squeezellm": Packed(SQUEEZELLM, partial(_squeezellm, sparse=False)),
    "squeezellm-outliers": Packed(SQUEEZELLM, partial(_squeezellm, sparse=True)),
}


if __name__ == "__main__":
    main()

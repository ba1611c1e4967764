"""Finds a model's tensors in GGUF files, under Hugging Face's names and in its layouts.

`find_tensors` checks that the files have the tensors that the model needs, and returns a `GGUFTensor` for each.

GGUF's layouts differ. In Llama's files, rotary embeddings rotate neighbouring rows of a head together, where Hugging
Face rotates halves. Gemma's norms have 1 added. Experts are stacked in one tensor. GPT-2's matrices are (outputs,
inputs).
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, Keys
from gguf.tensor_mapping import get_tensor_name_map
from msgspec import Struct
from numpy.typing import NDArray

from shared.errors import ModelError
from shared.gguf.header import Header, StoredTensor
from shared.gguf.shapes import SHAPES
from shared.gguf.tensor_data import (
    Region,
    check_type,
    dequantize_rows,
    map_blocks,
    read_tensor,
)

ROPE_FACTORS = frozenset({"rope_freqs.weight"})
CONFIG_TENSORS: dict[str, frozenset[str]] = {
    "Phi3ForCausalLM": frozenset({"rope_factors_long.weight", "rope_factors_short.weight"}),
    "GPT2LMHeadModel": frozenset(),
}
"""Tensors whose values are in config.json, by architecture; `ROPE_FACTORS` for those not listed."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


class GGUFTensor(Struct, frozen=True):
    """A tensor in GGUF files that has a name of Hugging Face's, and how its layout differs from Hugging Face's."""

    stored: StoredTensor
    expert: int | None = None  # index among the experts stacked in the tensor
    heads: int = 0  # number of heads, if their rows are in the order of `halves_from_pairs`'s input
    subtract: float = 0.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix_shape[::-1] if self.transposed else self.matrix_shape

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape as it is stored, of one expert: a matrix is (outputs, inputs), even where Hugging Face's is not."""
        return self.stored.shape if self.expert is None else self.stored.shape[1:]

    def map(self, region: Region = ()) -> NDArray[np.uint8]:
        """Return the blocks of the file that `read` reads."""
        return map_blocks(self.stored, self.expert, self._stored(region))

    def read(self, threads: int = 1, region: Region = ()) -> NDArray[Any]:
        """Return what `region` takes of the tensor, as floats. Its rows are whole heads."""
        values = read_tensor(self.stored, self.expert, threads, self._stored(region))
        if self.heads:
            values = halves_from_pairs(values, self._heads_in(len(values)))
        if self.subtract:
            values = values - np.float32(self.subtract)
        return values.T if self.transposed else values

    def read_rows(self, rows: slice, threads: int = 1, region: Region = ()) -> NDArray[np.float32]:
        """Return some rows of what `region` takes of a quantised matrix (outputs, inputs), dequantised, in Hugging
        Face's order. The region's outputs are whole heads.
        """
        order: slice | NDArray[np.intp] = rows
        if self.heads:
            count = region[0].stop - region[0].start if region else self.matrix_shape[0]
            order = halves_from_pairs(np.arange(count), self._heads_in(count))[rows]
        return dequantize_rows(self.stored, self.expert, order, threads, region)

    def map_matrix(self, region: Region = ()) -> list[NDArray[np.uint8]]:
        """Return the blocks (outputs, n, bytes) of what `region` takes of the matrix (outputs, inputs), as `map_blocks`
        does, in parts whose rows follow one another in Hugging Face's order. The region's outputs are whole heads.
        """
        blocks = map_blocks(self.stored, self.expert, region)
        if not self.heads:
            return [blocks]
        count = len(blocks)
        rows = count // self._heads_in(count)  # of a head
        halves = ((first + half, first + rows) for first in range(0, count, rows) for half in (0, 1))
        return [blocks[start:end:2] for start, end in halves]

    def _stored(self, region: Region) -> Region:
        return region[::-1] if self.transposed else region

    def _heads_in(self, rows: int) -> int:
        return self.heads * rows // self.shape[0]


def find_tensors(header: Header, config: Mapping[str, Any]) -> dict[str, GGUFTensor]:
    """Return the tensors by Hugging Face's names. Raise `ModelError` naming a missing, unknown or wrong tensor."""
    architecture = config["architectures"][0]
    shapes = SHAPES[architecture](config)
    names = _GGUFNames(header, config)
    tensors: dict[str, GGUFTensor] = {}
    for name, shape in shapes.items():
        stored = names.find(name)
        tensor = tensors[name] = _make_tensor(name, stored, config)
        check_type(stored)
        if tensor.shape != shape or (tensor.expert is not None and stored.shape[0] != names.experts):
            matrix = shape[::-1] if tensor.transposed else shape
            expected = list(matrix if tensor.expert is None else (names.experts, *matrix))
            raise ModelError(f"{stored}: the model's settings ask for the shape {expected}")
    used = {tensor.stored.name for tensor in tensors.values()} | CONFIG_TENSORS.get(architecture, ROPE_FACTORS)
    for name, stored in header.tensors.items():
        if name not in used:
            raise ModelError(f"{stored}: a {architecture} with these settings has no such tensor")
    return tensors


class _GGUFNames:
    """Maps Hugging Face's names to GGUF's, by the `gguf` package's table."""

    def __init__(self, header: Header, config: Mapping[str, Any]) -> None:
        architecture = header.metadata[Keys.General.ARCHITECTURE]
        arch_id = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
        layers = config.get("num_hidden_layers") or config["n_layer"]
        self.header, self.map = header, get_tensor_name_map(MODEL_ARCH(arch_id), layers)
        self.experts = config.get("num_local_experts") or config.get("num_experts")

    def find(self, name: str) -> StoredTensor:
        gguf_name = self.map.get_name(_EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        if gguf_name is None or gguf_name not in self.header.tensors:
            raise ModelError(f"{self.header.paths[0]}: tensor {gguf_name} (Hugging Face's {name}) is missing")
        return self.header.tensors[gguf_name]


def _make_tensor(name: str, stored: StoredTensor, config: Mapping[str, Any]) -> GGUFTensor:
    expert = _EXPERT.search(name)
    heads, model_type = 0, config["model_type"]
    if model_type in ("llama", "mixtral") and ".q_proj." in name:
        heads = config["num_attention_heads"]
    elif model_type in ("llama", "mixtral") and ".k_proj." in name:
        heads = config["num_key_value_heads"]
    return GGUFTensor(
        stored,
        expert=int(expert[1]) if expert else None,
        heads=heads,
        subtract=1.0 if model_type.startswith("gemma") and name.endswith("norm.weight") else 0.0,
        transposed=model_type == "gpt2" and name.endswith(_TRANSPOSED),
    )


def halves_from_pairs(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder the output rows (heads * dim, ...) of a projection that rotary embeddings rotate, or its biases.

    GGUF rotates neighbouring rows of a head (0, 1), (2, 3), ... together, Hugging Face row i with row i + dim / 2.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))

"""A model's tensors under Hugging Face's names and in its layouts, found in the GGUF files that hold them.

Llama's files turn neighbouring rows of a head together, where Hugging Face turns halves; Gemma's norms have 1 added;
experts are stacked in one tensor; GPT-2's matrices are stored outputs first. `find_sources` says for each of Hugging
Face's tensors what it is made of, and holds the file against what the model needs; `Source.read` makes it.
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
from shared.gguf.blocks import Codes, check_type, read_codes, read_part
from shared.gguf.header import Header, StoredTensor
from shared.gguf.layout import LAYOUTS

FREQUENCIES = frozenset({"rope_freqs.weight"})
HELPERS: dict[str, frozenset[str]] = {
    "Phi3ForCausalLM": frozenset({"rope_factors_long.weight", "rope_factors_short.weight"}),
    "GPT2LMHeadModel": frozenset(),
}
"""Tensors whose numbers config.json has, by architecture; all others have `FREQUENCIES`."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


class Source(Struct, frozen=True):
    """What one of Hugging Face's tensors is made of."""

    tensor: StoredTensor
    expert: int | None = None  # its number among those stacked in the tensor
    heads: int = 0  # whose rows lie in pairs; 0: none do
    subtract: float = 0.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        return shape[::-1] if self.transposed else shape

    def read(self, threads: int = 1) -> NDArray[Any]:
        """Its numbers, as floats."""
        values = read_part(self.tensor, self.expert, threads)
        if self.heads:
            values = halves_from_pairs(values, self.heads)
        if self.subtract:
            values = values - np.float32(self.subtract)
        return values.T if self.transposed else values

    def read_codes(self) -> Codes | None:
        """Its codes (outputs, inputs), if it is a matrix that is stored as plain blocks of 4 or 8 bits.

        Its outputs are in Hugging Face's order; they are the rows, also where Hugging Face has them as columns.
        """
        if self.subtract:
            return None
        found = read_codes(self.tensor, self.expert)
        if found is None or not self.heads:
            return found
        order = halves_from_pairs(np.arange(len(found.codes)), self.heads)
        leasts = None if found.leasts is None else found.leasts[order]
        return found._replace(codes=found.codes[order], steps=found.steps[order], leasts=leasts)


def find_sources(header: Header, config: Mapping[str, Any]) -> dict[str, Source]:
    """By Hugging Face's names. Raises `ModelError` naming the tensor that is missing, superfluous or wrong."""
    architecture = config["architectures"][0]
    shapes = LAYOUTS[architecture](config)
    names = _GGUFNames(header, config)
    sources: dict[str, Source] = {}
    for name, shape in shapes.items():
        stored = names.find(name)
        source = sources[name] = _source(name, stored, config)
        check_type(stored)
        if source.shape != shape or (source.expert is not None and stored.shape[0] != names.experts):
            expected = shape[::-1] if source.transposed else shape
            wanted = list(expected if source.expert is None else (names.experts, *expected))
            raise ModelError(f"{stored}: the model's settings ask for the shape {wanted}")
    used = {source.tensor.name for source in sources.values()} | HELPERS.get(architecture, FREQUENCIES)
    for name, tensor in header.tensors.items():
        if name not in used:
            raise ModelError(f"{tensor}: a {architecture} with these settings has no such tensor")
    return sources


class _GGUFNames:
    """GGUF's name for each of Hugging Face's, by the `gguf` package's table."""

    def __init__(self, header: Header, config: Mapping[str, Any]) -> None:
        architecture = header.metadata[Keys.General.ARCHITECTURE]
        kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
        layers = config.get("num_hidden_layers") or config["n_layer"]
        self.header, self.map = header, get_tensor_name_map(MODEL_ARCH(kind), layers)
        self.experts = config.get("num_local_experts") or config.get("num_experts")

    def find(self, name: str) -> StoredTensor:
        found = self.map.get_name(_EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        if found is None or found not in self.header.tensors:
            raise ModelError(f"{self.header.paths[0]}: tensor {found} (Hugging Face's {name}) is missing")
        return self.header.tensors[found]


def _source(name: str, stored: StoredTensor, config: Mapping[str, Any]) -> Source:
    expert = _EXPERT.search(name)
    heads, kind = 0, config["model_type"]
    if kind in ("llama", "mixtral") and ".q_proj." in name:
        heads = config["num_attention_heads"]
    elif kind in ("llama", "mixtral") and ".k_proj." in name:
        heads = config["num_key_value_heads"]
    return Source(
        stored,
        expert=int(expert[1]) if expert else None,
        heads=heads,
        subtract=1.0 if kind.startswith("gemma") and name.endswith("norm.weight") else 0.0,
        transposed=kind == "gpt2" and name.endswith(_TRANSPOSED),
    )


def halves_from_pairs(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder the output rows [heads * dim, ...] of a rotated projection, or its biases.

    GGUF turns neighbouring rows of a head (0, 1), (2, 3), ... together; Hugging Face turns row i with row i + dim / 2.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))

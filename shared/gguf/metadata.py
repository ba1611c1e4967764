"""`MetadataReader`: checked access to a GGUF file's metadata. A missing or impossible value is an error that names it.

It knows single keys and tensors and what must hold between them. `config` knows which keys an architecture has.
"""

import math
from typing import TypeVar

from gguf.constants import Keys, RopeScalingType
from msgspec import ValidationError, convert

from shared.errors import ModelError
from shared.gguf.header import Header
from shared.gguf.tensor_data import check_type, read_tensor

T = TypeVar("T", int, float, str)
Number = TypeVar("Number", int, float)


class MetadataReader:
    """The metadata of one model, by the keys of the `gguf` package."""

    def __init__(self, header: Header) -> None:
        self.header, self.values, self.path = header, header.metadata, header.paths[0]
        self.architecture = str(header.metadata.get(Keys.General.ARCHITECTURE, ""))

    def name(self, key: str) -> str:
        """Return the key with the name of the architecture filled in, as in the file."""
        return key.format(arch=self.architecture)

    def has(self, key: str) -> bool:
        return self.name(key) in self.values

    def get(self, key: str, type: type[T], default: T | None = None) -> T:
        """Return the value of `key`, or `default` if it is absent. Raise `ModelError` if there is no default either.

        Numbers are finite.
        """
        value = self.values.get(self.name(key), default)
        if value is None:
            raise ModelError(f"{self.path}: {self.name(key)} is missing")
        try:
            converted = convert(value, type)
        except ValidationError as error:  # a list: a number per layer, which these architectures do not have
            raise ModelError(f"{self.path}: {self.name(key)}: {error}") from error
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ModelError(f"{self.path}: {self.name(key)} is {converted}, which is no finite number")
        return converted

    def positive(self, key: str, type: type[Number], default: Number | None = None) -> Number:
        """Return a number as `get` does. Raise `ModelError` if it is not more than 0."""
        number = self.get(key, type, default)
        if number <= 0:
            raise ModelError(f"{self.path}: {self.name(key)} is {number}, and must be more than 0")
        return number

    def rope_scaling(self) -> str:
        """Return the type of rope scaling. A file with a factor and no type means `linear`."""
        has_factor = self.get(Keys.Rope.SCALING_FACTOR, float, 1.0) not in (0.0, 1.0)
        default = RopeScalingType.LINEAR if has_factor else RopeScalingType.NONE
        return self.get(Keys.Rope.SCALING_TYPE, str, str(default.value))

    def vocab_size(self) -> int:
        """Return the rows of the token embedding, which may be padded to more rows than there are tokens."""
        if (table := self.header.tensors.get("token_embd.weight")) is None:
            raise ModelError(f"{self.path}: tensor token_embd.weight is missing")
        tokens = len(self.values.get(Keys.Tokenizer.LIST, []))
        if len(table.shape) != 2 or table.shape[0] < tokens:
            raise ModelError(f"{table}: there are {tokens} tokens")
        return table.shape[0]

    def head_dim(self) -> int:
        """Return the dimensions of a head, which are the same for keys and values, and even."""
        heads, hidden = self.positive(Keys.Attention.HEAD_COUNT, int), self.positive(Keys.LLM.EMBEDDING_LENGTH, int)
        is_stored = self.has(Keys.Attention.KEY_LENGTH)
        dim = self.positive(Keys.Attention.KEY_LENGTH, int) if is_stored else hidden // heads
        if dim < 2 or dim % 2:
            name = Keys.Attention.KEY_LENGTH if is_stored else Keys.Attention.HEAD_COUNT
            raise ModelError(f"{self.path}: {self.name(name)} makes heads of {dim} dimensions, which must be even")
        if self.get(Keys.Attention.VALUE_LENGTH, int, dim) != dim:
            raise ModelError(f"{self.path}: {self.name(Keys.Attention.VALUE_LENGTH)} differs from the keys' {dim}")
        return dim

    def num_experts(self) -> int:
        """Return the number of experts in each layer; 0 if the model has none."""
        experts = self.get(Keys.LLM.EXPERT_COUNT, int, 0)
        router = self.header.tensors.get("blk.0.ffn_gate_inp.weight")
        if experts and (router is None or router.shape[:1] != (experts,)):
            prefix = router or f"{self.path}: tensor blk.0.ffn_gate_inp.weight is missing"
            raise ModelError(f"{prefix}: there are {experts} experts")
        return experts

    def experts_per_token(self, experts: int) -> int:
        """Return how many of the layer's `experts` compute a token."""
        if (used := self.positive(Keys.LLM.EXPERT_USED_COUNT, int)) > experts:
            raise ModelError(f"{self.path}: {self.name(Keys.LLM.EXPERT_USED_COUNT)} is {used} of {experts} experts")
        return used

    def rope_factors(self, name: str, dim: int) -> list[float] | None:
        """Return the factors of the rotary frequencies, from the tensor `name`; None if there is no such tensor."""
        if (tensor := self.header.tensors.get(name)) is None:
            return None
        if tensor.shape != (dim // 2,):
            raise ModelError(f"{tensor}: must have the shape {[dim // 2]}")
        check_type(tensor)
        factors = [float(str(value)) for value in read_tensor(tensor)]
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise ModelError(f"{tensor}: its numbers must be finite and more than 0")
        return factors

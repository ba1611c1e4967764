"""A GGUF file's settings, asked for one by one: each is there, of its kind and possible, or refused by name.

`Source` knows keys and tensors, and what must hold between them; which settings an architecture has is for `config`.
"""

import math
from typing import TypeVar

from gguf.constants import Keys, RopeScalingType
from msgspec import ValidationError, convert

from shared.errors import ModelError
from shared.gguf.blocks import check_type, read_part
from shared.gguf.header import Header

T = TypeVar("T", int, float, str)
Number = TypeVar("Number", int, float)


class Source:
    """A header, asked for settings by the `gguf` package's keys."""

    def __init__(self, header: Header) -> None:
        self.header, self.metadata, self.path = header, header.metadata, header.paths[0]
        self.architecture = str(header.metadata.get(Keys.General.ARCHITECTURE, ""))

    def name(self, key: str) -> str:
        return key.format(arch=self.architecture)

    def has(self, key: str) -> bool:
        return self.name(key) in self.metadata

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The setting; `default` if it is absent, and an error if there is none. Numbers are finite."""
        value = self.metadata.get(self.name(key), default)
        if value is None:
            raise ModelError(f"{self.path}: {self.name(key)} is missing")
        try:
            found = convert(value, kind)
        except ValidationError as error:  # numbers that differ by layer are lists, and not for these architectures
            raise ModelError(f"{self.path}: {self.name(key)}: {error}") from error
        if isinstance(found, float) and not math.isfinite(found):
            raise ModelError(f"{self.path}: {self.name(key)} is {found}, which is no finite number")
        return found

    def positive(self, key: str, kind: type[Number], default: Number | None = None) -> Number:
        """As `get`, of a number that cannot be 0."""
        found = self.get(key, kind, default)
        if found <= 0:
            raise ModelError(f"{self.path}: {self.name(key)} is {found}, and must be more than 0")
        return found

    def scaling(self) -> str:
        """How rotary positions are stretched. A factor alone has always meant `linear`."""
        alone = self.get(Keys.Rope.SCALING_FACTOR, float, 1.0) not in (0.0, 1.0)
        default = RopeScalingType.LINEAR if alone else RopeScalingType.NONE
        return self.get(Keys.Rope.SCALING_TYPE, str, str(default.value))

    def vocab_size(self) -> int:
        """Rows of the token table; there may be more of them than tokens, for the sake of alignment."""
        if (table := self.header.tensors.get("token_embd.weight")) is None:
            raise ModelError(f"{self.path}: tensor token_embd.weight is missing")
        tokens = len(self.metadata.get(Keys.Tokenizer.LIST, []))
        if len(table.shape) != 2 or table.shape[0] < tokens:
            raise ModelError(f"{table}: there are {tokens} tokens")
        return table.shape[0]

    def head_dim(self) -> int:
        """Of keys and values, which must have the same: an even number, as each rotary frequency turns two."""
        heads, hidden = self.positive(Keys.Attention.HEAD_COUNT, int), self.positive(Keys.LLM.EMBEDDING_LENGTH, int)
        given = self.has(Keys.Attention.KEY_LENGTH)
        dim = self.positive(Keys.Attention.KEY_LENGTH, int) if given else hidden // heads
        if dim < 2 or dim % 2:
            name = Keys.Attention.KEY_LENGTH if given else Keys.Attention.HEAD_COUNT
            raise ModelError(f"{self.path}: {self.name(name)} makes heads of {dim} dimensions, which must be even")
        if self.get(Keys.Attention.VALUE_LENGTH, int, dim) != dim:
            raise ModelError(f"{self.path}: {self.name(Keys.Attention.VALUE_LENGTH)} differs from the keys' {dim}")
        return dim

    def experts(self) -> int:
        """How many each layer has; 0: it has none."""
        experts = self.get(Keys.LLM.EXPERT_COUNT, int, 0)
        router = self.header.tensors.get("blk.0.ffn_gate_inp.weight")
        if experts and (router is None or router.shape[:1] != (experts,)):
            what = router or f"{self.path}: tensor blk.0.ffn_gate_inp.weight is missing"
            raise ModelError(f"{what}: there are {experts} experts")
        return experts

    def experts_used(self, experts: int) -> int:
        """How many of them compute a token."""
        if (used := self.positive(Keys.LLM.EXPERT_USED_COUNT, int)) > experts:
            raise ModelError(f"{self.path}: {self.name(Keys.LLM.EXPERT_USED_COUNT)} is {used} of {experts} experts")
        return used

    def factors(self, name: str, dim: int) -> list[float] | None:
        """Of the rotary frequencies, a tensor of its own; None if there is no such one."""
        if (tensor := self.header.tensors.get(name)) is None:
            return None
        if tensor.shape != (dim // 2,):
            raise ModelError(f"{tensor}: must have the shape {[dim // 2]}")
        check_type(tensor)
        factors = [float(str(value)) for value in read_part(tensor)]
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise ModelError(f"{tensor}: its numbers must be finite and more than 0")
        return factors

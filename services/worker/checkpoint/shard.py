"""`Shard`: an opened file of tensors; and what the readers of quantised formats share, which make matrices of them."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from shared.errors import ModelError
from shared.gguf.tensor_data import Region

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Types of the numbers that quants are multiplied with, or stand for."""


class Shard(Protocol):
    """An opened file of tensors."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str, region: Region = ()) -> Tensor:
        """Return what `region` takes of the tensor called `name`."""
        ...

    def mapped(self, name: str, region: Region = ()) -> list[Tensor]:
        """Return the parts of mapped files that `get_tensor` reads; none if the tensor is in memory."""
        ...


def quantized_modules(tensors: Mapping[str, Shard], method: str) -> list[str]:
    """Return the modules that have quants. Raise ModelError if none has, since config.json names a `method`."""
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    if not modules:
        raise ModelError(f"config.json says {method}, but the weight files have no tensor with quants (qweight)")
    return modules


def read_tensor(tensors: Mapping[str, Shard], name: str) -> Tensor:
    """Return the tensor called `name`. Raise ModelError if there is none."""
    if name not in tensors:
        raise ModelError(f"tensor {name} is missing")
    return tensors[name].get_tensor(name)


def describe(tensor: Tensor) -> str:
    """Return the type and the shape of a tensor, for an error."""
    return f"{tensor.dtype} {list(tensor.shape)}"

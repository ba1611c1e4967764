"""What the rest of the worker needs of a model, whichever code computes it: its shape, and two calls a step."""

from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from torch import Tensor


class Shape(Struct, frozen=True, kw_only=True):
    """The numbers from which memory is laid out and requests are judged."""

    architecture: str  # as in config.json
    vocab_size: int
    max_positions: int  # the longest context that the model was made for
    num_layers: int  # those that keep keys and values
    num_kv_heads: int
    head_dim: int


class Inputs(NamedTuple):
    """One step's batch, on the device. A row is tokens at consecutive positions; rows lie one behind the other."""

    tokens: Tensor  # (T,) int
    positions: Tensor  # (T,) int64
    slots: Tensor  # (T,) int64, flat places in the cache
    attention: Any  # the plan made by the kernels


class CausalLM(Protocol):
    """A loaded model on its device."""

    @property
    def shape(self) -> Shape: ...

    def reach(self, length: int) -> None:
        """Be ready for positions below `length`, the longest context that will be served."""

    def forward(self, inputs: Inputs, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states (T, H) of all tokens; their keys and values are put in `caches`, one pair a layer."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, V) float32 of hidden states (N, H) that `forward` gave."""
        ...

"""`CausalLM`: the interface of a model, whether Quire's or transformers' code computes it."""

from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from torch import Tensor

from kernels.lora import LoraSegments


class ModelShape(Struct, frozen=True, kw_only=True):
    """The sizes that KV memory and the limits of requests depend on; layers and heads are those of this rank."""

    architecture: str  # as in config.json
    vocab_size: int
    max_positions: int  # the longest context that the model was made for
    num_layers: int  # layers with keys and values
    num_kv_heads: int
    head_dim: int


class Inputs(NamedTuple):
    """The batch of a step, on the device. A row is tokens at consecutive positions; rows are concatenated."""

    tokens: Tensor  # (T,) int
    positions: Tensor  # (T,) int64
    slot_mapping: Tensor  # (T,) int64, flat indices into the KV cache
    attention: Any  # from `Ops.plan_attention`
    lora: LoraSegments | None = None  # the tokens that use adapters; None: none does
    outputs: Tensor | None = None  # (N,) int64: the last tokens of rows, whose hidden states are read; None: all tokens


class CausalLM(Protocol):
    """A loaded model on its device."""

    @property
    def shape(self) -> ModelShape: ...

    def prepare_positions(self, length: int) -> None:
        """Compute what the model needs for positions below `length`. Call it before the first `forward`."""

    def forward(self, inputs: Inputs, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the hidden states (N, H) of `inputs.outputs`. Keys and values go to `caches`, a pair for each layer.

        All ranks that compute the model together call it with the same inputs.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (N, V) float32 of hidden states (N, H) that `forward` returned.

        All ranks of the last stage call it, with the same hidden states, and get all logits. Others must not.
        """
        ...

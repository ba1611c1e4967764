"""`DecoderSpec`: everything that tells one decoder from another, as plain values.

A family makes one from a checkpoint's config.json; the decoder, the loader and the KV cache are built from it alone.
The names of parameters are ours; which tensors of a checkpoint they come from is in the family's `WeightNames`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from services.worker.models.causal_lm import Shape


class Rope(Struct, frozen=True):
    """Rotary positions. The angle of pair i at position p is `p * inverse_frequencies[i]`."""

    inverse_frequencies: tuple[float, ...]  # half as many as rotated dimensions
    magnitude: float = 1.0  # of cosine and sine


class DecoderSpec(Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only transformer."""

    architecture: str  # as in config.json
    vocab_size: int
    hidden_size: int
    embedding_size: int  # of the token table; projected to `hidden_size` and back where they differ
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int  # the longest context that the model was made for
    tied: bool  # the output layer is the token table
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu_and_mul", "relu"]  # the first: silu of one half of the up projection times the other
    norm_first: bool = True  # a block normalises its input; otherwise the sum it gives
    final_norm: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: Rope | None = None
    learned_positions: int | None = None  # rows of the position table that lie before position 0

    @property
    def shape(self) -> Shape:
        """What the rest of the worker needs to know."""
        return Shape(**{name: getattr(self, name) for name in Shape.__struct_fields__})

    @property
    def scale(self) -> float:
        """Of the attention scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class WeightNames:
    """Where a family's checkpoints keep each parameter: module names, without `.weight` and `.bias`."""

    prefixes: tuple[str, ...]  # before all names but the head's; the first that fits the checkpoint is taken
    layer: str  # prefix of a layer's names, with a place for its number
    modules: Mapping[str, str]  # of the model
    layer_modules: Mapping[str, tuple[str, ...]]  # of a layer; several are stacked along the output dimension
    head: str = "lm_head"
    ignored: tuple[str, ...] = ()  # endings of tensors that may be there and are not needed


@dataclass(frozen=True)
class Family:
    """One entry of the registry."""

    spec: Callable[[Mapping[str, Any]], DecoderSpec]  # from config.json; raises ModelError for what is not supported
    names: WeightNames


def parameters(spec: DecoderSpec) -> dict[str, list[tuple[int, ...]]]:
    """Each parameter of the model, and the shapes of the parts that are stacked to make it, in order."""
    hidden, embed = spec.hidden_size, spec.embedding_size
    shapes: dict[str, list[tuple[int, ...]]] = {"embedding.weight": [(spec.vocab_size, embed)]}
    if spec.learned_positions is not None:
        shapes["positions.weight"] = [(spec.max_positions + spec.learned_positions, hidden)]
    if embed != hidden:
        shapes |= {"project_in.weight": [(hidden, embed)], "project_out.weight": [(embed, hidden)]}
    if spec.final_norm:
        shapes |= _norm("final_norm", spec)
    if not spec.tied:
        shapes["head.weight"] = [(spec.vocab_size, embed)]
    for layer in range(spec.num_layers):
        shapes |= {f"layers.{layer}.{name}": parts for name, parts in _layer(spec).items()}
    return shapes


def _layer(spec: DecoderSpec) -> dict[str, list[tuple[int, ...]]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    up = [inner, inner] if spec.activation == "silu_and_mul" else [inner]
    return {
        **_norm("attention_norm", spec),
        **_linear("qkv", hidden, [queries, keys, keys], spec.attention_bias),
        **_linear("out", queries, [hidden], spec.attention_bias),
        **_norm("mlp_norm", spec),
        **_linear("up", hidden, up, spec.mlp_bias),
        **_linear("down", inner, [hidden], spec.mlp_bias),
    }


def _norm(name: str, spec: DecoderSpec) -> dict[str, list[tuple[int, ...]]]:
    kinds = ("weight", "bias") if spec.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": [(spec.hidden_size,)] for kind in kinds}


def _linear(name: str, inputs: int, outputs: list[int], bias: bool) -> dict[str, list[tuple[int, ...]]]:
    shapes: dict[str, list[tuple[int, ...]]] = {f"{name}.weight": [(out, inputs) for out in outputs]}
    if bias:
        shapes[f"{name}.bias"] = [(out,) for out in outputs]
    return shapes

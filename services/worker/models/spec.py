"""`DecoderSpec`: everything that tells one decoder from another, as plain values.

A family makes one from a checkpoint's config.json; the decoder, the loader and the KV cache are built from it alone.
The names of parameters are ours; which tensors of a checkpoint they come from is in the family's `WeightNames`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.causal_lm import Shape
from shared.errors import ModelError

Activation = Literal["silu_and_mul", "gelu_tanh_and_mul", "gelu_tanh", "relu"]
"""Those with `and_mul` apply to one half of the up projection and multiply by the other."""

_GELU_BY_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
"""transformers' names of gelu's approximation by tanh: written differently, the same up to rounding."""
PLAIN: Mapping[str, Activation] = {**dict.fromkeys(_GELU_BY_TANH, "gelu_tanh"), "relu": "relu"}
GATES: Mapping[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), "silu_and_mul"),
    **dict.fromkeys(_GELU_BY_TANH, "gelu_tanh_and_mul"),
}
"""The activations of feed-forward blocks without and with a gate, by the names that config.json has for them."""


class Rope(Struct, frozen=True):
    """Rotary positions. The angle of pair i at position p is `p * inverse_frequencies[i]`."""

    inverse_frequencies: tuple[float, ...]  # half as many as rotated dimensions
    magnitude: float = 1.0  # of cosine and sine
    short_positions: int = 0  # the longest context that the above is for, where `long_inverse_frequencies` is given
    long_inverse_frequencies: tuple[float, ...] = ()  # for all contexts where longer ones may come


class Experts(Struct, frozen=True):
    """A feed-forward block of which each token uses a few parts."""

    count: int
    top_k: int  # how many a token uses
    intermediate_size: int  # of one
    normalised: bool  # the weights of those that are used sum to 1


class LayerSpec(Struct, frozen=True, kw_only=True):
    """What may differ from layer to layer."""

    window: int = 0  # how many positions a query sees, its own included; 0: all
    rope: Rope | None = None
    experts: Experts | None = None


class DecoderSpec(Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only transformer."""

    architecture: str  # as in config.json
    vocab_size: int
    hidden_size: int
    embedding_size: int  # of the token table; projected to `hidden_size` and back where they differ
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int  # the longest context that the model was made for
    layers: tuple[LayerSpec, ...]
    tied: bool  # the output layer is the token table
    norm: Literal["rms", "rms_plus_one", "layer"]  # the second: its weight is kept as the distance from 1
    norm_eps: float
    activation: Activation
    norm_first: bool = True  # a block normalises its input; otherwise the sum it gives
    post_norms: bool = False  # a block normalises what it adds, too
    final_norm: bool = True
    qk_norm: bool = False  # each head's query and key are normalised before they are rotated
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    learned_positions: int | None = None  # rows of the position table that lie before position 0
    embedding_scale: float = 1.0  # of the token table's rows, on their way in
    attention_scale: float | None = None  # of the attention scores; head_dim ** -0.5 if not given
    attention_softcap: float = 0.0  # the bound of scores, smoothly; 0: none
    logit_softcap: float = 0.0  # of logits, likewise

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_positions", "num_layers"):
            if getattr(self, name) < 1:
                raise ModelError(f"config.json: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads is {self.num_heads}, "
                f"no multiple of num_key_value_heads, {self.num_kv_heads}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def shape(self) -> Shape:
        """What the rest of the worker needs to know."""
        return Shape(**{name: getattr(self, name) for name in Shape.__struct_fields__})

    @property
    def scale(self) -> float:
        """Of the attention scores."""
        return float(self.head_dim**-0.5) if self.attention_scale is None else self.attention_scale


@dataclass(frozen=True)
class WeightNames:
    """Where a family's checkpoints keep each parameter: module names, without `.weight` and `.bias`."""

    prefixes: tuple[str, ...]  # that a tensor may have before its name; an error on a missing one names the first
    layer: str  # prefix of a layer's names, with a place for its number
    modules: Mapping[str, str]  # of the model
    layer_modules: Mapping[str, tuple[str, ...]]
    """Of a layer. Several are stacked along the output dimension; one alone holds them stacked. An expert's have a
    place for its number."""
    head: str = "lm_head"
    stacked_experts: Mapping[str, str] = field(default_factory=dict)
    """Tensors, not modules, that hold a part of all experts of a layer (experts, outputs, inputs), by that part."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Pieces of names that some checkpoints have in place of others: theirs to ours."""
    transposed: tuple[str, ...] = ()  # those of `layer_modules` whose weights are stored as (in, out)
    ignored: tuple[str, ...] = ()  # endings of tensors that may be there and are not needed
    unserved: tuple[str, ...] = ()  # beginnings of tensors of other parts of the model, as those for images


@dataclass(frozen=True)
class Family:
    """One entry of the registry."""

    spec: Callable[[ConfigJson], DecoderSpec]  # from config.json; raises ModelError for what is not supported
    names: WeightNames


Shapes = dict[str, list[tuple[int, ...]]]
Listed = Iterator[tuple[str, list[tuple[int, ...]]]]


def parameters(spec: DecoderSpec) -> Listed:
    """Each parameter of the model, and the shapes of the parts that are stacked to make it, in order.

    They are made one by one, since a wrong config.json may ask for any number of them.
    """
    yield from _ends(spec).items()
    for index, layer in enumerate(spec.layers):
        yield from ((f"layers.{index}.{name}", parts) for name, parts in _layer(spec, layer))


def _ends(spec: DecoderSpec) -> Shapes:
    """Those before and behind the layers."""
    hidden, embed = spec.hidden_size, spec.embedding_size
    shapes: Shapes = {"embedding.weight": [(spec.vocab_size, embed)]}
    if spec.learned_positions is not None:
        shapes["positions.weight"] = [(spec.max_positions + spec.learned_positions, hidden)]
    if embed != hidden:
        shapes |= {"project_in.weight": [(hidden, embed)], "project_out.weight": [(embed, hidden)]}
    if spec.final_norm:
        shapes |= _norm("final_norm", hidden, spec)
    if not spec.tied:
        shapes["head.weight"] = [(spec.vocab_size, embed)]
    return shapes


def _layer(spec: DecoderSpec, layer: LayerSpec) -> Listed:
    yield from _attention(spec).items()
    if layer.experts is None:
        yield from _feed_forward(spec).items()
    else:
        yield from _experts(spec, layer.experts)


def _attention(spec: DecoderSpec) -> Shapes:
    hidden, dim = spec.hidden_size, spec.head_dim
    queries, keys = spec.num_heads * dim, spec.num_kv_heads * dim
    shapes = {
        **_norm("attention_norm", hidden, spec),
        **_linear("qkv", hidden, [queries, keys, keys], spec.qkv_bias),
        **_linear("out", queries, [hidden], spec.out_bias),
        **_norm("mlp_norm", hidden, spec),
    }
    if spec.qk_norm:
        shapes |= _norm("q_norm", dim, spec) | _norm("k_norm", dim, spec)
    if spec.post_norms:
        shapes |= _norm("attention_post_norm", hidden, spec) | _norm("mlp_post_norm", hidden, spec)
    return shapes


def _feed_forward(spec: DecoderSpec) -> Shapes:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return _linear("up", hidden, _up(inner, spec), spec.mlp_bias) | _linear("down", inner, [hidden], spec.mlp_bias)


def _experts(spec: DecoderSpec, experts: Experts) -> Listed:
    hidden, inner = spec.hidden_size, experts.intermediate_size
    yield from _linear("router", hidden, [experts.count], bias=False).items()
    for expert in range(experts.count):
        yield from _linear(f"experts.{expert}.up", hidden, _up(inner, spec), bias=False).items()
        yield from _linear(f"experts.{expert}.down", inner, [hidden], bias=False).items()


def _up(inner: int, spec: DecoderSpec) -> list[int]:
    return [inner, inner] if spec.activation.endswith("_and_mul") else [inner]


def _norm(name: str, width: int, spec: DecoderSpec) -> Shapes:
    kinds = ("weight", "bias") if spec.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": [(width,)] for kind in kinds}


def _linear(name: str, inputs: int, outputs: list[int], bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": [(out, inputs) for out in outputs]}
    if bias:
        shapes[f"{name}.bias"] = [(out,) for out in outputs]
    return shapes

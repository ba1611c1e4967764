"""`DecoderSpec`: everything that tells one decoder from another, as plain values.

A family makes one from a checkpoint's config.json; the decoder, the loader and the KV cache are built from it alone.
`parameter_shapes` lists the parameters and how ranks divide them; share.py says what each rank gets. The names of
parameters are Quire's own; a family's `WeightNames` says which tensors of a checkpoint they come from.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from msgspec import Struct, field

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.causal_lm import ModelShape
from shared.errors import ModelError

Activation = Literal["silu_and_mul", "gelu_tanh_and_mul", "gelu_tanh", "relu"]
"""An activation. `..._and_mul` applies it to the first half of the up projection, and multiplies by the second."""

_GELU_BY_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
"""transformers' names of the tanh approximation of gelu. They differ in rounding only."""

PLAIN_ACTIVATIONS: Mapping[str, Activation] = {**dict.fromkeys(_GELU_BY_TANH, "gelu_tanh"), "relu": "relu"}
GATED_ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), "silu_and_mul"),
    **dict.fromkeys(_GELU_BY_TANH, "gelu_tanh_and_mul"),
}
"""Activations of feed-forward blocks without and with a gate, by their names in config.json."""


class Rope(Struct, frozen=True):
    """Rotary positions. The angle of pair i at position p is `p * inverse_frequencies[i]`."""

    inverse_frequencies: tuple[float, ...]  # half as many as rotated dimensions
    attention_factor: float = 1.0  # multiplies cosines and sines
    original_max_positions: int = 0  # if longer contexts are served, `long_inverse_frequencies` are used
    long_inverse_frequencies: tuple[float, ...] = ()  # empty: there are none


class Experts(Struct, frozen=True):
    """A mixture of experts: feed-forward blocks, of which each token uses a few."""

    count: int
    top_k: int  # how many a token uses
    intermediate_size: int  # of one expert
    renormalize: bool  # scale the weights of a token's experts to sum to 1


class LayerSpec(Struct, frozen=True, kw_only=True):
    """The fields of a spec that may differ between layers."""

    window: int = 0  # positions that a query sees, its own included; 0: all
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
    norm: Literal["rms", "rms_plus_one", "layer"]  # "rms_plus_one": checkpoints store the weight minus 1
    norm_eps: float
    activation: Activation
    norm_first: bool = True  # norms precede attention and feed-forward; otherwise they follow the sum
    post_norms: bool = False  # a second norm follows attention and feed-forward, before the sum
    final_norm: bool = True
    qk_norm: bool = False  # queries and keys are normalised, head by head, before they are rotated
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    position_offset: int | None = None  # rows of the learned position table before position 0; None: no such table
    embedding_scale: float = 1.0  # factor of embeddings before the first layer
    attention_scale: float | None = None  # factor of attention scores; None: head_dim ** -0.5
    attention_softcap: float = 0.0  # smooth bound of attention scores; 0: none
    logit_softcap: float = 0.0  # smooth bound of logits; 0: none

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
        if self.qk_norm and self.norm == "layer":
            raise ModelError(f"{self.architecture}: no kernel normalises queries and keys by layer norm")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def shape(self) -> ModelShape:
        """The numbers that the rest of the worker needs."""
        return ModelShape(**{name: getattr(self, name) for name in ModelShape.__struct_fields__})

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return float(self.head_dim**-0.5) if self.attention_scale is None else self.attention_scale


class WeightNames(Struct, frozen=True, kw_only=True):
    """The modules of a family's checkpoints that hold each parameter, without `.weight` and `.bias`."""

    prefixes: tuple[str, ...]  # that tensor names may begin with; errors about missing tensors use the first
    layer: str  # prefix of a layer's names; {} stands for its index
    modules: Mapping[str, str]  # modules outside the layers
    layer_modules: Mapping[str, tuple[str, ...]]
    """Modules of a layer. If a parameter has several, their weights are concatenated along the output dimension. {} in
    the name of an expert's module stands for the expert's index."""
    head: str = "lm_head"
    stacked_experts: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors (experts, outputs, inputs) that hold the weights of all experts of a layer, by parameter."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Substrings of tensor names in some checkpoints, and the substrings of the names above that they replace."""
    transposed: tuple[str, ...] = ()  # keys of `layer_modules` whose weights are stored as (in, out)
    ignored_suffixes: tuple[str, ...] = ()  # of tensors that a checkpoint may have and the model does not need
    unsupported_prefixes: tuple[str, ...] = ()  # of tensors of parts that Quire does not serve, such as a vision tower


class Family(Struct, frozen=True):
    """An entry of the registry: a family's reader of config.json, and the names of its tensors."""

    read_spec: Callable[[ConfigJson], DecoderSpec]  # raises ModelError if the config is not supported
    names: WeightNames


Divided = Literal["whole", "outputs", "inputs", "vocabulary", "first"]
"""How tensor parallel ranks divide a tensor: each rank has all of it, some outputs, some inputs, or some rows of the
vocabulary. Products with some inputs are summed over the ranks. What only the first rank has is added to such a sum.
"""


class Part(NamedTuple):
    """One of the tensors that are concatenated along the first dimension to make a parameter."""

    shape: tuple[int, ...]  # of a matrix: outputs, inputs
    divided: Divided = "whole"
    units: int = 1  # equal pieces of the divided dimension that stay whole, such as heads


Parts = list[Part]


def parameter_shapes(spec: DecoderSpec) -> Iterator[tuple[str, Parts]]:
    """Yield (name, its parts in order) for each parameter of the model, before it is divided among ranks.

    This is an iterator since a wrong config.json may ask for any number of them.
    """
    yield from _ends(spec).items()
    for index, layer in enumerate(spec.layers):
        yield from ((f"layers.{index}.{name}", parts) for name, parts in _layer(spec, layer))


def _ends(spec: DecoderSpec) -> dict[str, Parts]:
    """Return the parameters before and after the layers."""
    hidden, embed = spec.hidden_size, spec.embedding_size
    table = Part((spec.vocab_size, embed), "vocabulary")
    parts: dict[str, Parts] = {"embedding.weight": [table]}
    if spec.position_offset is not None:
        parts["positions.weight"] = [Part((spec.max_positions + spec.position_offset, hidden))]
    if embed != hidden:
        parts |= {"project_in.weight": [Part((hidden, embed))], "project_out.weight": [Part((embed, hidden))]}
    if spec.final_norm:
        parts |= _norm("final_norm", hidden, spec)
    if not spec.tied:
        parts["head.weight"] = [table]
    return parts


def _layer(spec: DecoderSpec, layer: LayerSpec) -> Iterator[tuple[str, Parts]]:
    yield from _attention(spec).items()
    if layer.experts is None:
        yield from _feed_forward(spec, "", spec.intermediate_size, bias=spec.mlp_bias).items()
    else:
        yield from _experts(spec, layer.experts)


def _attention(spec: DecoderSpec) -> dict[str, Parts]:
    hidden, dim = spec.hidden_size, spec.head_dim
    parts = {
        **_norm("attention_norm", hidden, spec),
        **_by_outputs("qkv", hidden, dim, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], spec.qkv_bias),
        **_by_inputs("out", spec.num_heads, dim, hidden, spec.out_bias),
        **_norm("mlp_norm", hidden, spec),
    }
    if spec.qk_norm:
        parts |= _norm("q_norm", dim, spec) | _norm("k_norm", dim, spec)
    if spec.post_norms:
        parts |= _norm("attention_post_norm", hidden, spec) | _norm("mlp_post_norm", hidden, spec)
    return parts


def _feed_forward(spec: DecoderSpec, prefix: str, inner: int, *, bias: bool) -> dict[str, Parts]:
    hidden = spec.hidden_size
    up = [inner, inner] if spec.activation.endswith("_and_mul") else [inner]
    return _by_outputs(f"{prefix}up", hidden, 1, up, bias) | _by_inputs(f"{prefix}down", inner, 1, hidden, bias)


def _experts(spec: DecoderSpec, experts: Experts) -> Iterator[tuple[str, Parts]]:
    """Yield the parameters of a mixture. Ranks have a slice of each expert, so they route alike."""
    yield "router.weight", [Part((experts.count, spec.hidden_size))]
    for expert in range(experts.count):
        yield from _feed_forward(spec, f"experts.{expert}.", experts.intermediate_size, bias=False).items()


def _norm(name: str, width: int, spec: DecoderSpec) -> dict[str, Parts]:
    vectors = ("weight", "bias") if spec.norm == "layer" else ("weight",)
    return {f"{name}.{vector}": [Part((width,))] for vector in vectors}


def _by_outputs(name: str, inputs: int, size: int, units: list[int], bias: bool) -> dict[str, Parts]:
    """Return a linear layer whose parts have some units of outputs each, of one size. Ranks divide the units."""
    parts = {f"{name}.weight": [Part((count * size, inputs), "outputs", count) for count in units]}
    if bias:
        parts[f"{name}.bias"] = [Part((count * size,), "outputs", count) for count in units]
    return parts


def _by_inputs(name: str, units: int, size: int, outputs: int, bias: bool) -> dict[str, Parts]:
    """Return a linear layer of some units of inputs, of one size. Ranks divide the units."""
    parts = {f"{name}.weight": [Part((outputs, units * size), "inputs", units)]}
    if bias:
        parts[f"{name}.bias"] = [Part((outputs,), "first")]
    return parts

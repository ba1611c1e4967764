"""The decoder: one forward pass over a ragged batch, for any spec.

It knows only tensors. A row of the batch is any number of tokens at consecutive positions, and `slot_mapping` says
where in the cache their keys and values go. Nothing here tells prefill from decode.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.decoder_layers import DecoderLayer, LayerConfig
from kernels.lora import LoraStack
from kernels.ops import Ops
from services.worker.models.causal_lm import Inputs, ModelShape
from services.worker.models.decoder.attention import Attention, RotaryTables
from services.worker.models.decoder.feed_forward import FeedForward, MixtureOfExperts
from services.worker.models.decoder.layers import ForwardContext, Linear, Norm, Weights
from services.worker.models.decoder.token_table import TokenTable
from services.worker.models.share import Share
from services.worker.models.spec import DecoderSpec, LayerSpec
from services.worker.parallel_config import ONE_RANK
from services.worker.rank_group import RankGroup

Caches = list[tuple[Tensor, Tensor]]


class Layer(NamedTuple):
    """The modules of one layer."""

    attention_norm: Norm
    attention: Attention
    attention_post_norm: Norm | None
    mlp_norm: Norm
    mlp: FeedForward | MixtureOfExperts
    mlp_post_norm: Norm | None

    @property
    def linears(self) -> dict[str, Linear]:
        """The linear operations that adapters can change, by the names of their parameters."""
        attention = {"qkv": self.attention.qkv, "out": self.attention.out}
        return attention | ({"up": self.mlp.up, "down": self.mlp.down} if isinstance(self.mlp, FeedForward) else {})


class Decoder:
    """A rank's part of a model's weights, and its forward pass.

    All ranks of `group` compute it together, each at the same time with the same inputs. `spec`, and so `shape`, is
    what this rank has of the whole model's: the layers of its stage, and as many heads.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        ops: Ops,
        *,
        kv_dtype: torch.dtype = torch.float32,
        lora: Mapping[str, LoraStack] | None = None,
        group: RankGroup | None = None,
    ) -> None:
        """`spec` is the whole model's; `weights` and `lora`, the adapters' slots by operation, are this rank's.

        `kv_dtype` is the type of the caches that `forward` will get. `group` may be connected later.
        """
        self._group = group or RankGroup(ONE_RANK, weights.device)
        share = Share(spec, self._group.parallel)
        self.spec = spec = share.spec
        self._ops = ops
        self._device = weights.device
        self._embedding = self._table("embedding", weights, share)
        # A checkpoint may have a head although its config says that it is tied.
        self._head = self._table("head", weights, share) or self._embedding
        self._positions = weights.load("positions.weight") if "positions.weight" in weights else None
        self._project_in = Linear(weights, "project_in", ops) if "project_in.weight" in weights else None
        self._project_out = Linear(weights, "project_out", ops) if "project_out.weight" in weights else None
        self._final_norm = Norm(weights, "final_norm", spec, ops) if "final_norm.weight" in weights else None
        self._layers = []
        for index, layer_spec in zip(share.layers, spec.layers, strict=True):
            layer = _layer(weights, index, layer_spec, spec, ops, self._group, kv_dtype)
            for name, linear in layer.linears.items():
                linear.lora = (lora or {}).get(f"layers.{index}.{name}")
            self._layers.append(layer)
        packed = any(layer.attention.kv_bias.keys is not None for layer in self._layers)
        self._rotary = RotaryTables(spec.layers, ops, packed=packed)
        # The type of what the stage before sends; None: there is none.
        self._received = None if self._group.parallel.is_first_stage else _activations_dtype(weights, ops)
        self.fused_layers = self._fuse_layers()

    @property
    def shape(self) -> ModelShape:
        return self.spec.shape

    def prepare_positions(self, length: int) -> None:
        """Compute rotary tables for positions below `length`."""
        self._rotary.build(length, self._device)

    def forward(self, inputs: Inputs, caches: Caches) -> Tensor:
        """Return the hidden states of tokens behind this rank's layers, and before the last norm. Keys and values go to
        `caches`.

        The last stage returns those of `inputs.outputs` (N, H). Others send those of all tokens (T, H) to the stage
        behind, and return them.
        """
        if not self._group.parallel.is_last_stage:
            inputs = inputs._replace(outputs=None)
        if self._received:
            x = self._group.receive((len(inputs.tokens), self.spec.hidden_size), self._received)
        else:
            x = self._embed(inputs)
        x = self._compute_layers(x, inputs, caches)
        if not self._group.parallel.is_last_stage:
            self._group.send(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (N, V) float32 of hidden states (N, H) that `forward` returned. Only the last stage can."""
        if self._head is None or not self._group.parallel.is_last_stage:
            raise RuntimeError("only the last stage has an output layer")
        if self._final_norm:
            hidden = self._final_norm(hidden)
        if self._project_out:
            hidden = self._project_out(hidden)
        logits = self._head.logits(hidden)
        cap = self.spec.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _table(self, module: str, weights: Weights, share: Share) -> TokenTable | None:
        name = f"{module}.weight"
        return TokenTable(weights, name, share, self._group, self._ops) if name in weights else None

    def _embed(self, inputs: Inputs) -> Tensor:
        assert self._embedding, "the first stage has the embedding"
        x = self._embedding.embed(inputs.tokens)
        if self.spec.embedding_scale != 1:
            # The scale is rounded to x's type first, as transformers does by multiplying with a tensor.
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype).item()
        if self._project_in:
            x = self._project_in(x)
        if self._positions is not None:
            x = x + self._ops.embedding(inputs.positions + (self.spec.position_offset or 0), self._positions)
        return x

    def _compute_layers(self, x: Tensor, inputs: Inputs, caches: Caches) -> Tensor:
        if self.fused_layers:
            return self.fused_layers(
                x,
                caches,
                inputs.slot_mapping,
                inputs.attention,
                inputs.positions,
                list(self._rotary.cos_sin.values()),
                list(self._rotary.angles.values()),
                inputs.lora,
                inputs.outputs,
            )
        context = ForwardContext(inputs, self._rotary.cos_sin, self._rotary.angles)
        x = self._norm_first(x, context, caches) if self.spec.norm_first else self._norm_last(x, context, caches)
        return x if inputs.outputs is None else x.index_select(0, inputs.outputs)

    def _norm_first(self, residual: Tensor, context: ForwardContext, caches: Caches) -> Tensor:
        """Compute x + f(norm(x)), twice a layer.

        The sum and the norm that follows it are one operation, so the last f(norm(x)) is not yet added to the residual.
        """
        x: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            normed, residual = layer.attention_norm.add(x, residual)
            x = layer.attention(normed, context, cache)
            if layer.attention_post_norm:
                x = layer.attention_post_norm(x)
            normed, residual = layer.mlp_norm.add(x, residual)
            x = layer.mlp(normed, context.inputs.lora)
            if layer.mlp_post_norm:
                x = layer.mlp_post_norm(x)
        return residual if x is None else residual + x

    def _norm_last(self, x: Tensor, context: ForwardContext, caches: Caches) -> Tensor:
        """Compute norm(x + f(x)), twice a layer."""
        for layer, cache in zip(self._layers, caches, strict=True):
            x, _ = layer.attention_norm.add(layer.attention(x, context, cache), x)
            x, _ = layer.mlp_norm.add(layer.mlp(x, context.inputs.lora), x)
        return x

    def _fuse_layers(self) -> Callable[..., Tensor] | None:
        """Return one operation that computes all layers, or None if the kernels have none for such layers.

        Tensor parallel ranks compute without it, since they add up what they have twice a layer.
        """
        spec, ropes = self.spec, self._rotary.ropes
        if self._group.parallel.tensor_parallel_size > 1:
            return None
        if not spec.norm_first or spec.norm == "layer" or spec.num_layers == 0:
            return None
        parts = []
        for layer in self._layers:
            attention, mlp = layer.attention, layer.mlp
            if isinstance(mlp, MixtureOfExperts):
                return None
            parts.append(
                DecoderLayer(
                    attention_norm=layer.attention_norm.weight,
                    qkv=attention.qkv.projection,
                    q_norm=_weight(attention.q_norm),
                    k_norm=_weight(attention.k_norm),
                    out=attention.out.projection,
                    attention_post_norm=_weight(layer.attention_post_norm),
                    mlp_norm=layer.mlp_norm.weight,
                    up=mlp.up.projection,
                    down=mlp.down.projection,
                    mlp_post_norm=_weight(layer.mlp_post_norm),
                    window=attention.layer.window,
                    rope=ropes.index(attention.layer.rope) if attention.layer.rope else None,
                    kv_bias=attention.kv_bias,
                    lora={name: linear.lora for name, linear in layer.linears.items() if linear.lora},
                )
            )
        config = LayerConfig(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            softcap=spec.attention_softcap,
            eps=spec.norm_eps,
            activation=spec.activation,
        )
        return self._ops.fuse_layers(config, parts)


def _weight(norm: Norm | None) -> Tensor | None:
    return norm.weight if norm else None


def _activations_dtype(weights: Weights, ops: Ops) -> torch.dtype:
    """Return the type of activations: that of embedded tokens, also in stages without an embedding."""
    table = torch.zeros(1, 1, dtype=weights.dtype, device=weights.device)
    return ops.embedding(torch.zeros(1, dtype=torch.int64, device=weights.device), table).dtype


def _layer(
    weights: Weights,
    index: int,
    layer: LayerSpec,
    spec: DecoderSpec,
    ops: Ops,
    group: RankGroup,
    kv_dtype: torch.dtype,
) -> Layer:
    prefix = f"layers.{index}."
    return Layer(
        attention_norm=Norm(weights, f"{prefix}attention_norm", spec, ops),
        attention=Attention(weights, prefix, layer, spec, ops, group, kv_dtype=kv_dtype),
        attention_post_norm=Norm(weights, f"{prefix}attention_post_norm", spec, ops) if spec.post_norms else None,
        mlp_norm=Norm(weights, f"{prefix}mlp_norm", spec, ops),
        mlp=MixtureOfExperts(weights, prefix, layer.experts, spec, ops, group)
        if layer.experts
        else FeedForward(weights, prefix, spec, ops, group),
        mlp_post_norm=Norm(weights, f"{prefix}mlp_post_norm", spec, ops) if spec.post_norms else None,
    )

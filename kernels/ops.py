"""The operations that every device implements: names, parameters, shapes and types.

A device's folder implements them in files of the same names, and its `ops.py` imports them all. `load.py` chooses one.
`kernels/reference` has the formulas.

Letters: T tokens of a batch, H hidden size, D head dimension, Hq and Hkv query and KV heads, R rotated dimensions of a
head, P positions of a table, S rows of logits, V vocabulary, N items. A float tensor has the model's type unless noted
otherwise; the CPU's compiled kernels have activations of float32 whatever that is. Results are new tensors, and inputs
are not changed unless noted as written.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch_rows import BatchRows
from kernels.decoder_layers import DecoderLayer, Expert, LayerConfig
from kernels.kv_bias import KVBias
from kernels.layout import KVLayout
from kernels.lora import LoraPart, LoraSegments, LoraStack, LoraWeights
from kernels.quantized import Weight
from kernels.sampling_metadata import SamplingMetadata


class Ops(Protocol):
    """The operations of one device."""

    kv_cache_dtypes: frozenset[torch.dtype]  # that a cache may have beside the model's own type
    supports_graphs: bool  # no operation waits for the device, so a CUDA graph can hold them
    quantized_weights: bool  # `pack_linear` and `pack_experts` take weights that are quantised

    # attention

    def plan_attention(
        self,
        rows: BatchRows,
        block_tables: Tensor,  # (slots, M) int32 or int64: the blocks up to each row's last position, or more
        *,
        block_size: int,
        num_kv_heads: int,
    ) -> Any:
        """Return what `paged_attention` needs to know of a batch. It is the same for all layers."""

    def paged_attention(
        self,
        q: Tensor,  # (T, Hq, D), any strides
        key_cache: Tensor,  # (block, Hkv, slot, D): a view of a `kv_layout`; of quants with scales, or floats
        value_cache: Tensor,  # as `key_cache`
        plan: Any,  # from `plan_attention`
        *,
        scale: float,
        window: int = 0,  # positions that a query sees, its own included; 0: all
        softcap: float = 0.0,  # 0: none
        bias: KVBias | None = None,  # the biases that the cache leaves out
        angles: Any = None,  # from `pack_angles`, if keys are rotated
    ) -> Tensor:
        """Return the attention (T, Hq, D) of queries whose own keys and values are in the cache already.

        The kernel may ignore the keys' bias in dimensions that are not rotated: it adds the same to all scores of a
        query. With a softcap that would be wrong, so such a bias must not be left out of the cache.
        """

    def pack_angles(
        self,
        cos: Tensor,  # (P, R) float32
        sin: Tensor,  # (P, R) float32
    ) -> Any:
        """Return the angles of positions 0 to P - 1 in the form that `paged_attention` takes."""

    # prepare

    def copy_segments(
        self,
        destination: Tensor,  # (D,) int32, written
        source: Tensor,  # (E,) int32, which may be `destination`
        segments: Tensor,  # (N, 3) int64: first index in the destination, first index in the source, length
        longest: int,  # the length of the longest segment
    ) -> None:
        """Copy runs of numbers. No number is written twice, or both read and written."""

    def prepare_inputs(
        self,
        rows: BatchRows,
        tokens: Tensor,  # (slots, L) int32: the tokens of each slot's sequence
        block_tables: Tensor,  # (slots, M) int32
        *,
        num_tokens: int,  # T, at least offsets[-1]
        block_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens (T,) of a batch, int32, their positions (T,) int64 and flat indices (T,) int64 (layout.py).

        What follows after the last row's tokens is padding: token 0 at position 0, and the index -1.
        """

    # cache

    def kv_layout(
        self, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> KVLayout:
        """Return the layout of caches that `paged_attention` and `write_kv` work with."""

    def write_kv(
        self,
        keys: Tensor,  # (T, Hkv, D), any strides
        values: Tensor,  # (T, Hkv, D), any strides
        key_cache: Tensor,  # (block, Hkv, slot, D), written
        value_cache: Tensor,  # (block, Hkv, slot, D), written
        slot_mapping: Tensor,  # (T,) int64 flat indices (layout.py), all different
    ) -> None:
        """Store keys and values in the caches, quantised if those have scales."""

    def rotate_and_store(
        self,
        qkv: Tensor,  # (T, Hq + 2 Hkv, D): the heads of queries, keys and values; any strides
        key_cache: Tensor,  # (block, Hkv, slot, D), written
        value_cache: Tensor,  # (block, Hkv, slot, D), written
        slot_mapping: Tensor,  # as in `write_kv`
        *,
        positions: Tensor,  # (T,) int64, below P
        cos_sin: tuple[Tensor, Tensor] | None = None,  # (P, R) float32, R ≤ D, both halves equal; None: no rotation
        norms: tuple[Tensor, Tensor] | None = None,  # weights (D,) of the norms of queries and keys; None: no norms
        eps: float = 0.0,  # of the norms
    ) -> Tensor:
        """Store keys and values as `write_kv` does, and return the queries (T, Hq, D), of any strides.

        Queries and keys are first normalised as by `rms_norm`, head by head; then the first R dimensions of each head
        are rotated by its token's angles.
        """

    def copy_blocks(
        self,
        storage: Tensor,  # (layer, 2, block, ...), written
        sources: Tensor,  # (N,) int64
        destinations: Tensor,  # (N,) int64; no block is in both
    ) -> None:
        """Copy whole blocks, in all layers."""

    def swap_out(
        self,
        storage: Tensor,  # (layer, 2, block, ...)
        host: Tensor,  # (host block, layer, 2, ...) in host memory, pinned if `storage` is on a GPU; written
        moves: Sequence[tuple[int, int]],  # (block, host block), no host block twice
    ) -> None:
        """Copy whole blocks to host memory. On a GPU this waits for nothing."""

    def swap_in(
        self,
        storage: Tensor,  # as in `swap_out`, written
        host: Tensor,
        moves: Sequence[tuple[int, int]],  # (host block, block), no block twice
    ) -> None:
        """Copy whole blocks back from host memory. On a GPU this waits for nothing."""

    # elementwise

    def pack_vector(self, vector: Tensor) -> Tensor:
        """Return a weight or bias (H,) in the form that norms and linear operations take."""

    def rms_norm(
        self,
        x: Tensor,  # (..., H)
        weight: Tensor,  # (H,) of `x`'s type or float32
        eps: float,
    ) -> Tensor:
        """Return the root-mean-square norm (..., H) over the last dimension."""

    def add_rms_norm(
        self,
        x: Tensor,  # (..., H)
        residual: Tensor,  # (..., H)
        weight: Tensor,  # (H,)
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, sum), both (..., H)."""

    def layer_norm(
        self,
        x: Tensor,  # (..., H)
        weight: Tensor,  # (H,)
        bias: Tensor | None,  # (H,)
        eps: float,
    ) -> Tensor:
        """Return the layer norm (..., H) over the last dimension."""

    def add_layer_norm(
        self,
        x: Tensor,  # (..., H)
        residual: Tensor,  # (..., H)
        weight: Tensor,  # (H,)
        bias: Tensor | None,  # (H,)
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, sum), both (..., H)."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return (T, I) of (T, 2 I): gate in the first half of the last dimension, up in the second."""

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return (T, I) of (T, 2 I), as `silu_and_mul`."""

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """Return gelu(x) in its tanh form, of any shape."""

    def relu(self, x: Tensor) -> Tensor:
        """Return relu(x), of any shape."""

    # linear

    def pack_linear(
        self,
        weight: Weight,  # (out, in)
    ) -> Any:
        """Return the weight in the form that `linear` and `embedding` take.

        Raise TypeError for one that is to be rounded, unless `quantized_weights`.
        """

    def linear(
        self,
        x: Tensor,  # (T, in)
        weight: Any,  # from `pack_linear`
        bias: Tensor | None,  # (out,)
    ) -> Tensor:
        """Return x Wᵀ + b, (T, out) of `x`'s type."""

    def logits(
        self,
        x: Tensor,  # (N, in)
        weight: Any,  # from `pack_linear`
    ) -> Tensor:
        """Return x Wᵀ, (N, out) float32."""

    def embedding(
        self,
        ids: Tensor,  # (T,) of any integer type
        table: Any,  # a tensor (N, H), or a weight from `pack_linear`, whose rows are the outputs
    ) -> Tensor:
        """Return the table's rows (T, H), in the type of activations."""

    # lora

    def new_lora(
        self,
        slots: int,
        rank: int,  # from `padded_rank`
        inputs: int,
        outputs: tuple[int, ...],  # of each part
        dtype: torch.dtype,
        device: torch.device,
    ) -> LoraStack:
        """Return slots for the adapters of a linear operation, without any."""

    def pack_lora(
        self,
        parts: Sequence[LoraPart | None],  # None: the adapter leaves the part alone
        stack: LoraStack,  # of which the sizes, the order and the type count
    ) -> LoraWeights:
        """Return an adapter's weights as `LoraStack.put` takes them. It may be called in another thread."""

    def lora_shrink(
        self,
        x: Tensor,  # (T, in)
        stack: LoraStack,
        segments: LoraSegments,
    ) -> Tensor:
        """Return the products (T, ...) float32 of A and each token that uses an adapter; the others' are anything."""

    def lora_expand(
        self,
        y: Tensor,  # (T, out), written
        shrunk: Tensor,  # from `lora_shrink`
        stack: LoraStack,
        segments: LoraSegments,
    ) -> None:
        """Add the products with B to the rows of tokens that use an adapter, and leave the others' bits alone."""

    # experts

    def route(
        self,
        logits: Tensor,  # (T, experts)
        top_k: int,
        renormalize: bool,  # the weights of a token sum to 1
    ) -> tuple[Tensor, Tensor]:
        """Return the weights (T, K) float32 and ids (T, K) int64 of each token's experts, largest weight first."""

    def pack_experts(
        self,
        experts: Iterable[Expert],  # of one layer; taken one by one, so that none needs to be kept
        count: int,  # how many there are
    ) -> Any:
        """Return a layer's experts as `mix_experts` takes them."""

    def mix_experts(
        self,
        x: Tensor,  # (T, H)
        topk_weights: Tensor,  # (T, K) float32
        topk_ids: Tensor,  # (T, K) int64
        experts: Any,  # from `pack_experts`
    ) -> Tensor:
        """Return the weighted sum (T, H) of the outputs of each token's experts."""

    # decoder_layers

    def fuse_layers(self, config: LayerConfig, layers: Sequence[DecoderLayer]) -> Callable[..., Tensor] | None:
        """Return all layers of a decoder as one operation, or None if the device has none for these layers.

        It takes embeddings (T, H), each layer's caches, the slot mapping (T,), the batch's plan, positions (T,) int64,
        cosines and sines (P, R) of each rope, the packed angles of each rope (none if no layer has a `kv_bias` of
        keys), the tokens that use adapters (`LoraSegments`, or None), and those whose hidden states it returns: (N,)
        int64, ascending, the last ones of rows, or None for all.
        """

    # sampling

    def penalties(
        self,
        logits: Tensor,  # (S, V)
        tokens: Tensor,  # (S, L) int32 or int64: the first lengths[r] of row r are its tokens, the rest anything
        prompt_lens: Tensor,  # (S,) int64, at least 1: how many of the tokens are the prompt
        lengths: Tensor,  # (S,) int64
        repetition: Tensor,  # (S,) of the logits' type
        presence: Tensor,  # (S,) of the logits' type
        frequency: Tensor,  # (S,) of the logits' type
    ) -> Tensor:
        """Return the logits (S, V) with penalties."""

    def pack_metadata(self, metadata: SamplingMetadata) -> npt.NDArray[np.int32] | None:
        """Return parameters in the form that `sample` reads on the device; None if it reads them on the host."""

    def sample(
        self,
        logits: Tensor,  # (S, V) float32
        metadata: SamplingMetadata,  # of N tokens
        packed: Tensor | None = None,  # what `pack_metadata` returned, on the device; without it, it is copied there
        masks: Tensor | None = None,  # (M, W) int32, W = ceil(V / 32): bit i of word w allows token 32 w + i
    ) -> Tensor:
        """Return tokens (N,) int64. Tokens that a mask does not allow count as if their logits were -inf."""

    def logprobs(
        self,
        logits: Tensor,  # (S, V) float32
        tokens: Tensor,  # (S,) int64
        k: int,  # how many of the likeliest tokens to list
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log-probabilities (S,) and ranks (S,) int64 of `tokens`, then ids (S, k) int64 and log-probabilities
        (S, k) of the likeliest tokens.

        The likeliest token has rank 1. Ties rank in the order of their ids, in the list too.
        """

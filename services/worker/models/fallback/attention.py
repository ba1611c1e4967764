"""Connects transformers' attention interface to a paged cache.

transformers' modelling code calls an attention function by the name in its config. `Recorder` is that function for one
forward pass, and records the calls. Afterwards, `PagedAttention` serves the same calls, in the same order, from the
cache of the running step. The order of the calls identifies the layer, so a module that is called twice has two caches,
as it must. Windows are read from transformers' mask functions, since not every layer passes its window to attention.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from services.worker.models.causal_lm import Inputs
from shared.errors import ModelError

_IGNORED_OPTIONS = {
    "dropout", "hidden_states", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_embeddings", "position_ids", "return_dict", "sliding_window", "use_cache",
}  # fmt: skip
"""Arguments of a call that are ignored. The window is read from the mask, and dropout is off."""

_numbers = itertools.count()


class AttentionCall(NamedTuple):
    """A call of the attention function: the sizes of its keys and values, and its window."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int  # positions that a query sees, its own included; 0: all


class Recorder:
    """An attention function and a mask function that record their calls, and compute nothing."""

    def __init__(self, max_positions: int) -> None:
        self.calls: list[AttentionCall] = []
        self._max_positions = max_positions
        self._windows: dict[int, int | None] = {}  # by the address of a mask; None: it is no window
        self._masks: list[Tensor] = []  # kept, so that no address is used twice

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Act as an attention function. Raise ModelError if the call asks for what paged attention lacks."""
        _check_options(module, options)
        window = self._window(module, attention_mask, options)
        self.calls.append(AttentionCall(key.shape[1], key.shape[3], value.shape[3], window))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def mask(self, **arguments: Any) -> Tensor | None:
        """Act as a mask function. Return a mask for eager attention, and remember its window."""
        from transformers.masking_utils import eager_mask

        mask: Tensor | None = eager_mask(**arguments)
        if mask is not None:  # it is None for attention in both directions
            self._windows[mask.data_ptr()] = _read_window(arguments, self._max_positions)
            self._masks.append(mask)
        return mask

    def _window(self, module: torch.nn.Module, mask: Tensor | None, options: dict[str, Any]) -> int:
        if mask is None:
            causal = options.get("is_causal")
            if not (getattr(module, "is_causal", False) if causal is None else causal):
                raise ModelError("some attention of it is not causal")
            return 0
        if mask.data_ptr() not in self._windows:
            raise ModelError("it masks attention in a way of its own")
        window = self._windows[mask.data_ptr()]
        if window is None:
            raise ModelError("some attention of it is neither causal nor of a sliding window")
        return window


class PagedAttention:
    """An attention function that writes keys and values to the cache of the running step, and attends to the cache."""

    def __init__(self, calls: list[AttentionCall], ops: Ops) -> None:
        self._calls = calls
        self._ops = ops
        self._inputs: Inputs | None = None
        self._pending_calls: Iterator[tuple[AttentionCall, tuple[Tensor, Tensor]]] = iter(())

    @contextmanager
    def step(self, inputs: Inputs, caches: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Serve the calls of this step within the block: one for each of `caches`, in order."""
        self._inputs, self._pending_calls = inputs, iter(zip(self._calls, caches, strict=True))
        try:
            yield
            if next(self._pending_calls, None) is not None:
                raise RuntimeError("the model called its attention less often than when it was loaded")
        finally:
            self._inputs, self._pending_calls = None, iter(())

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Take `query` (1, Hq, T, D), `key` (1, Hkv, T, D) and `value` (1, Hkv, T, E). Return (1, T, Hq, E)."""
        pending = next(self._pending_calls, None)
        if pending is None or self._inputs is None:
            raise RuntimeError("the model called its attention more often than when it was loaded")
        call, (key_cache, value_cache) = pending
        heads, dim = key_cache.shape[1], key_cache.shape[3]
        queries_per_kv = query.shape[1] // call.num_kv_heads
        keys, values = (_padded(part[0].transpose(0, 1), heads, dim, key_cache.dtype) for part in (key, value))
        self._ops.write_kv(keys, values, key_cache, value_cache, self._inputs.slot_mapping)
        out = self._ops.paged_attention(
            _padded(query[0].transpose(0, 1), heads * queries_per_kv, dim, key_cache.dtype),
            key_cache,
            value_cache,
            self._inputs.attention,
            scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
            window=call.window,
            softcap=softcap or 0.0,
        )
        return out[None, :, : query.shape[1], : call.value_dim].to(query.dtype).contiguous(), None


@contextmanager
def registered(recorder: Recorder) -> Iterator[str]:
    """Register `recorder` in transformers' interfaces within the block, and yield its name there."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = f"quire_recorder_{next(_numbers)}"
    AttentionInterface.register(name, recorder.attend)
    AttentionMaskInterface.register(name, recorder.mask)
    try:
        yield name
    finally:  # the interfaces have no other way to remove a name
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]


def register(attention: PagedAttention) -> tuple[str, Callable[[], None]]:
    """Register `attention` in transformers' interface. Return its name there, and a function that removes it.

    It has no mask function, so transformers makes no masks for it.
    """
    from transformers.modeling_utils import AttentionInterface

    name = f"quire_paged_{next(_numbers)}"
    AttentionInterface.register(name, attention.attend)
    return name, lambda: AttentionInterface._global_mapping.pop(name, None)


def _padded(x: Tensor, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return `x` (T, H, D) in `dtype`, padded with zeros to the cache's heads and dim: a layer may have fewer."""
    if x.shape[1:] != (heads, dim):
        x = F.pad(x, (0, dim - x.shape[2], 0, heads - x.shape[1]))
    return x.to(dtype)


def _check_options(module: torch.nn.Module, options: dict[str, Any]) -> None:
    if options.get("is_causal") is False:
        raise ModelError("some attention of it is not causal")
    requested = {name for name, value in options.items() if value is not None and value is not False}
    if others := sorted(requested - _IGNORED_OPTIONS - {"is_causal", "scaling", "softcap"}):
        raise ModelError(f"{type(module).__name__} asks its attention for {', '.join(others)}, which ours lacks")


def _read_window(arguments: dict[str, Any], max_positions: int) -> int | None:
    """Return the window of a mask by the arguments of its mask function; 0 if it is causal, None if it is neither.

    The mask function is evaluated where it could differ: around multiples of the window, and at the last positions. It
    refuses nothing, since some models make masks that no layer uses.
    """
    local = arguments.get("local_size") or 0
    positions = {0, 1, 2, 3, 5, max_positions // 3, max_positions // 2, max_positions - 2, max_positions - 1}
    positions |= {local * times + offset for times in (1, 2, 3) for offset in (-2, -1, 0, 1, 2)}
    index = torch.tensor(sorted(position for position in positions if 0 <= position < max_positions))
    index = index.to(arguments.get("device", "cpu"))
    queries, keys = index[:, None], index[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=index.device)
    try:
        seen = torch.as_tensor(arguments["mask_function"](zero, zero, queries, keys)).expand(len(index), len(index))
    except (IndexError, RuntimeError, TypeError):  # the function works only for the tokens of this call
        return None
    for window in dict.fromkeys((local, 0)):
        expected = (keys <= queries) & (keys > queries - window) if window else keys <= queries
        if torch.equal(seen.bool(), expected):
            return window
    return None

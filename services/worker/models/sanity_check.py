"""The sanity check of a model before it is served: it computes the logits of a few tokens.

They must be finite: broken weights, or a type too narrow for them, would give nonsense. For a model of transformers,
they must equal those of transformers' own attention, also if the prompt comes in pieces and beside another sequence.
They differ if the model mixes tokens anywhere but in attention, or changes attention by its mask. Such a model is
refused.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.batch_rows import BatchRows
from kernels.ops import Ops
from services.worker.models.causal_lm import CausalLM, Inputs
from shared.errors import ModelError

_BLOCK_SIZE = 16  # the default of --block-size, with which a GPU's kernels are compiled already
_LENGTH = 12
_LENGTH_OF_FINITE = 2  # tokens show weights that are not finite; more take as long as much of loading does
_PIECE_LENGTHS = (5, 1, 6)
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.15}
"""The largest norm of the difference, relative to that of the logits. In half precision, the rounding errors of deep
models add up to some hundredths."""


def sanity_check_tokens(vocab_size: int) -> list[int]:
    """Return tokens to check a model with; all are different where the vocabulary allows it."""
    return [(7 + 31 * index) % vocab_size for index in range(_LENGTH)]


def refuse_if_not_finite(
    model: CausalLM, dtype: torch.dtype, device: torch.device, ops: Ops, *, has_logits: bool = True
) -> None:
    """Raise ModelError unless `model` gives finite logits for a few tokens, or hidden states if it is a stage that has
    no output layer. A rank's part of a model is checked as if the other ranks had nothing to add.
    """
    length = min(_LENGTH_OF_FINITE, model.shape.max_positions)
    model.prepare_positions(length + 1)
    with torch.inference_mode():
        tokens = sanity_check_tokens(model.shape.vocab_size)[:length]
        sequence = _CheckedSequence(model, tokens, dtype, device, ops, alone=True)
        check_finite(sequence.logits([length]) if has_logits else sequence.hidden([length]), dtype)


def check_finite(logits: Tensor, dtype: torch.dtype) -> None:
    """Raise ModelError if one of the `logits`, computed in `dtype`, is not finite."""
    if not logits.isfinite().all():
        computed = str(dtype).removeprefix("torch.")
        raise ModelError(f"the model's logits are not finite: weights are broken, or too large for {computed}")


def refuse_if_different(model: CausalLM, tokens: Sequence[int], expected: Tensor, dtype: torch.dtype, ops: Ops) -> None:
    """Raise ModelError unless `model` gives the logits `expected` (T, V) of `tokens`, whole and in pieces."""
    sequence = _CheckedSequence(model, tokens, dtype, expected.device, ops)
    whole = sequence.logits([_LENGTH])
    if not _is_close(whole, expected, dtype):
        raise ModelError("paged attention gives other logits: it keeps other state, or masks attention by itself")
    if not _is_close(sequence.logits(_PIECE_LENGTHS), whole, dtype):
        raise ModelError("a prompt in pieces gives other logits: it keeps state outside of attention")


class _CheckedSequence:
    """A sequence of `tokens` in a small cache. Unless it is `alone`, a neighbour in front of it shares every step: the
    same tokens in reverse.
    """

    def __init__(
        self,
        model: CausalLM,
        tokens: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        *,
        alone: bool = False,
    ) -> None:
        self._model, self._ops = model, ops
        shape = model.shape
        blocks = -(-len(tokens) // _BLOCK_SIZE)
        layout = ops.kv_layout(shape.num_layers, shape.num_kv_heads, shape.head_dim, _BLOCK_SIZE, dtype)
        self._storage = layout.allocate(2 * blocks, device)
        self._caches = layout.views(self._storage)
        own = torch.tensor([tokens], device=device)
        self._tokens = own if alone else torch.cat((own.flip(1), own))  # (sequences, length)
        tables = torch.arange(2 * blocks, dtype=torch.int32, device=device).view(2, blocks)
        self._tables = torch.stack((tables[0], tables[1].flip(0)))

    def logits(self, pieces: Sequence[int]) -> Tensor:
        """Return the sequence's logits (T, V), computed in `pieces`."""
        hidden = torch.split(self.hidden(pieces), list(pieces))
        return torch.cat([self._model.logits(piece) for piece in hidden])

    def hidden(self, pieces: Sequence[int]) -> Tensor:
        """Return its hidden states (T, H), computed in `pieces`."""
        self._storage.zero_()
        hidden = []
        for start, end in itertools.pairwise(itertools.accumulate(pieces, initial=0)):
            hidden.append(self._model.forward(self._inputs(start, end), self._caches)[start - end :])
        return torch.cat(hidden)

    def _inputs(self, start: int, end: int) -> Inputs:
        count, device, sequences = end - start, self._tokens.device, len(self._tokens)
        positions = torch.arange(start, end, device=device).repeat(sequences)
        rows = torch.arange(sequences, device=device).repeat_interleave(count)
        blocks = self._tables[rows, positions // _BLOCK_SIZE]
        offsets = list(range(0, (sequences + 1) * count, count))
        return Inputs(
            tokens=self._tokens[:, start:end].flatten(),
            positions=positions,
            slot_mapping=blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE,
            attention=self._ops.plan_attention(
                BatchRows.of(*map(_int32, (offsets, [start] * sequences, list(range(sequences))))).to(device),
                self._tables,
                block_size=_BLOCK_SIZE,
                num_kv_heads=self._model.shape.num_kv_heads,
            ),
        )


def _int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _is_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all rows agree, or in half precision most rows: a near tie of experts may change a row."""
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    worst = error.max() if dtype == torch.float32 else error.median()
    return bool(worst < _TOLERANCE[dtype])  # false for NaN

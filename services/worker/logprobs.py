"""Log-probabilities on their way out: from hidden states and logits to `TokenLogprobs`."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Ops
from services.worker.batch import Batch
from services.worker.models.causal_lm import CausalLM
from services.worker.sampler import Draws
from services.worker.slots import Slots
from shared.protocol import TokenLogprobs

_SLICE = 256
"""Prompt positions whose logits are in memory at a time: a long prompt's would be gigabytes."""


def sampled_logprobs(
    logits: Tensor, tokens: Tensor, draws: Draws, state: Slots, ops: Ops
) -> dict[int, list[TokenLogprobs]]:
    """By slot, for those of the drawn `tokens` (N,) whose requests want them. `logits` (L, V) are the raw ones."""
    asked = np.flatnonzero(state.logprobs[draws.slots] >= 0)
    if not len(asked):
        return {}
    slots = draws.slots[asked]
    wanted = state.logprobs[slots].tolist()
    index, rows = (torch.from_numpy(array).to(logits.device) for array in (asked, draws.rows[asked]))
    entries = _entries(ops.logprobs(logits[rows], tokens[index], max(wanted)), wanted)
    return {slot: [entry] for slot, entry in zip(slots.tolist(), entries, strict=True)}


def prompt_logprobs(
    hidden: Tensor, batch: Batch, state: Slots, decoder: CausalLM, ops: Ops
) -> dict[int, list[TokenLogprobs]]:
    """By slot, for the rows of `batch` that want them: of positions start + 1 to min(start + count, prompt_len - 1).

    `hidden` (T, H) is the forward pass's result. A position's distribution comes from the token before it.
    """
    found: dict[int, list[TokenLogprobs]] = {}
    for row, slot in enumerate(batch.slots.tolist()):
        wanted = int(state.prompt_logprobs[slot])
        if wanted < 0:
            continue
        start = int(batch.starts[row])
        count = min(int(batch.counts[row]), int(state.prompt_len[slot]) - 1 - start)
        entries: list[TokenLogprobs] = []
        for done in range(0, count, _SLICE):
            size = min(_SLICE, count - done)
            first = int(batch.offsets[row]) + done
            targets = state.tokens[slot, start + done + 1 : start + done + 1 + size].long()
            logits = decoder.logits(hidden[first : first + size])
            entries += _entries(ops.logprobs(logits, targets, wanted), [wanted] * size)
        if entries:
            found[slot] = entries
    return found


def _entries(parts: tuple[Tensor, Tensor, Tensor, Tensor], wanted: Sequence[int]) -> Iterator[TokenLogprobs]:
    lists = [part.tolist() for part in parts]
    for logprob, rank, ids, values, k in zip(*lists, wanted, strict=True):
        yield TokenLogprobs(logprob=logprob, rank=rank, top_ids=ids[:k], top_logprobs=values[:k])

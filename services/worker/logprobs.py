"""The log-probabilities that requests ask for, as messages (`TokenLogprobs`)."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Ops
from services.worker.batch import Batch
from services.worker.models.causal_lm import CausalLM
from services.worker.sampler import SamplingBatch
from services.worker.sequence_states import SequenceStates
from shared.protocol import TokenLogprobs

_CHUNK = 256
"""Prompt positions whose logits are computed at once. The logits of a long prompt would take gigabytes."""


def sampled_logprobs(
    logits: Tensor, tokens: Tensor, batch: SamplingBatch, states: SequenceStates, ops: Ops
) -> dict[int, list[TokenLogprobs]]:
    """Return the log-probabilities of the sampled `tokens` (N,), by slot, for the requests that ask for them.

    `logits` (L, V) are those of the model, before bias, masks and penalties.
    """
    requested = np.flatnonzero(states.num_logprobs[batch.slots] >= 0)
    if not len(requested):
        return {}
    slots = batch.slots[requested]
    counts = states.num_logprobs[slots].tolist()
    token_index, logit_rows = (
        torch.from_numpy(array).to(logits.device) for array in (requested, batch.rows[requested])
    )
    entries = _entries(ops.logprobs(logits[logit_rows], tokens[token_index], max(counts)), counts)
    return {slot: [entry] for slot, entry in zip(slots.tolist(), entries, strict=True)}


def prompt_logprobs(
    hidden: Tensor, batch: Batch, states: SequenceStates, model: CausalLM, ops: Ops
) -> dict[int, list[TokenLogprobs]]:
    """Return the log-probabilities of prompt tokens, by slot, for the rows of `batch` whose requests ask for them.

    A row gives the log-probabilities of positions start + 1 to min(start + count, prompt_len - 1), since the hidden
    state at a position predicts the next token. `hidden` (T, H) is the result of the forward pass.
    """
    by_slot: dict[int, list[TokenLogprobs]] = {}
    for row, slot in enumerate(batch.slots.tolist()):
        num_logprobs = int(states.num_prompt_logprobs[slot])
        if num_logprobs < 0:
            continue
        start = int(batch.starts[row])
        count = min(int(batch.counts[row]), int(states.prompt_len[slot]) - 1 - start)
        entries: list[TokenLogprobs] = []
        for done in range(0, count, _CHUNK):
            size = min(_CHUNK, count - done)
            first = int(batch.offsets[row]) + done
            targets = states.tokens[slot, start + done + 1 : start + done + 1 + size].long()
            logits = model.logits(hidden[first : first + size])
            entries += _entries(ops.logprobs(logits, targets, num_logprobs), [num_logprobs] * size)
        if entries:
            by_slot[slot] = entries
    return by_slot


def _entries(columns: tuple[Tensor, Tensor, Tensor, Tensor], counts: Sequence[int]) -> Iterator[TokenLogprobs]:
    """Yield a message for each row of what `Ops.logprobs` returned, with the first `counts[row]` alternatives."""
    lists = [column.tolist() for column in columns]
    for logprob, rank, ids, values, count in zip(*lists, counts, strict=True):
        yield TokenLogprobs(logprob=logprob, rank=rank, top_ids=ids[:count], top_logprobs=values[:count])

"""The log-probabilities that requests ask for, as messages (`TokenLogprobs`)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kernels.ops import Ops
from kernels.reference.sampling import LOGPROB_FLOOR
from services.worker.batch import Batch
from services.worker.models.causal_lm import CausalLM
from services.worker.sampler import SamplingBatch
from services.worker.sequence_states import Ints, SequenceStates
from services.worker.transfers import Section, StepBuffer
from shared.protocol import TokenLogprobs

_CHUNK = 256
"""Prompt positions whose logits are computed at once. The logits of a long prompt would take gigabytes."""


class LogprobRows(NamedTuple):
    """Log-probabilities on the device, N rows of them."""

    slots: Sequence[int]  # (N,): whose they are
    counts: Sequence[int]  # (N,): how many alternatives are to be listed
    columns: tuple[Tensor, Tensor, Tensor, Tensor]  # from `Ops.logprobs`

    def entries(self, columns: Sequence[Tensor]) -> Iterator[tuple[int, TokenLogprobs]]:
        """Yield a message for each row with its slot, from `columns` on the host."""
        lists = [column.tolist() for column in columns]
        for slot, count, logprob, rank, ids, values in zip(self.slots, self.counts, *lists, strict=True):
            yield slot, TokenLogprobs(logprob=logprob, rank=rank, top_ids=ids[:count], top_logprobs=values[:count])


class StagedLogprobs(NamedTuple):
    """Tokens of a `SamplingBatch` whose requests ask for log-probabilities."""

    slots: list[int]
    counts: list[int]
    tokens: Section  # their indices in the batch
    rows: Section  # their rows of the logits
    ids: Section | None  # (M, K) int64: the alternatives, in rows of different lengths; None: the likeliest tokens


def stage_logprobs(batch: SamplingBatch, states: SequenceStates, buffer: StepBuffer) -> list[StagedLogprobs]:
    """Add to `buffer` which tokens of `batch` need log-probabilities: those whose requests ask for the likeliest tokens
    beside them, and those whose requests name others.
    """
    requested = np.flatnonzero(states.num_logprobs[batch.slots] >= 0)
    groups = []
    for has_ids in (False, True):
        part = requested[states.has_logprob_ids[batch.slots[requested]] == has_ids]
        if not len(part):
            continue
        slots = batch.slots[part]
        counts = states.num_logprobs[slots].tolist()
        ids = None
        if has_ids:
            listed = [sampling.logprob_token_ids for slot in slots if (sampling := states.sampling[slot])]
            counts = list(map(len, listed))
            padded = np.array([row + [0] * (max(counts) - len(row)) for row in listed], np.int64)
            ids = buffer.add(padded)
        groups.append(StagedLogprobs(slots.tolist(), counts, buffer.add(part), buffer.add(batch.rows[part]), ids))
    return groups


def sampled_logprobs(logits: Tensor, tokens: Tensor, staged: StagedLogprobs, ops: Ops) -> LogprobRows:
    """Return the log-probabilities of the sampled `tokens` (N,).

    `logits` (L, V) are those of the model, before bias, masks and penalties.
    """
    rows, chosen = logits.index_select(0, staged.rows.tensor), tokens.index_select(0, staged.tokens.tensor)
    if staged.ids is None:
        return LogprobRows(staged.slots, staged.counts, ops.logprobs(rows, chosen, max(staged.counts)))
    logprobs, ranks, *likeliest = ops.logprobs(rows, chosen, 1)
    ids = staged.ids.tensor
    return LogprobRows(staged.slots, staged.counts, (logprobs, ranks, ids, _logprobs_of(rows, ids, *likeliest)))


def _logprobs_of(logits: Tensor, ids: Tensor, likeliest: Tensor, its_logprobs: Tensor) -> Tensor:
    """log p(id) = x[id] - log Σ exp(x), for `ids` (M, K) of each row.

    The sum follows from the likeliest token (M, 1), so that it depends on the row alone, and not on what was sampled.
    """
    total = logits.gather(-1, likeliest) - its_logprobs
    logprobs = logits.gather(-1, ids) - total
    return logprobs.nan_to_num(nan=LOGPROB_FLOOR, neginf=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)


def prompt_logprob_rows(batch: Batch, states: SequenceStates) -> Ints:
    """Return the rows of `batch` that compute prompt tokens whose log-probabilities are asked for."""
    asked = states.num_prompt_logprobs[batch.slots] >= 0
    return np.flatnonzero(asked & (batch.starts < states.prompt_len[batch.slots] - 1))


def prompt_logprobs(
    hidden: Tensor, rows: Ints, batch: Batch, states: SequenceStates, model: CausalLM, ops: Ops
) -> Iterator[LogprobRows]:
    """Yield the log-probabilities of prompt tokens for the `rows` that `prompt_logprob_rows` returned, in order.

    A row gives the log-probabilities of positions start + 1 to min(start + count, prompt_len - 1), since the hidden
    state at a position predicts the next token. `hidden` (T, H) are the hidden states of all tokens.
    """
    for row in rows.tolist():
        slot, start = int(batch.slots[row]), int(batch.starts[row])
        num_logprobs = int(states.num_prompt_logprobs[slot])
        count = min(int(batch.counts[row]), int(states.prompt_len[slot]) - 1 - start)
        for done in range(0, count, _CHUNK):
            size = min(_CHUNK, count - done)
            first = int(batch.offsets[row]) + done
            targets = states.tokens[slot, start + done + 1 : start + done + 1 + size].long()
            logits = model.logits(hidden[first : first + size])
            yield LogprobRows([slot] * size, [num_logprobs] * size, ops.logprobs(logits, targets, num_logprobs))

"""Penalties, sampling and log-probabilities: csrc/sampling.cpp.

The tokens are the same as the reference's: noise has the same bits, and ties go to the lowest id. There is one
exception. Sums of probabilities are added in another order, and float32 exponentials of unlikely tokens may differ in
the last bit, so top_p may keep another token if a sum is within 1e-8 of its limit.
"""

import torch
from torch import Tensor

from kernels.reference.sampling import GREEDY_BELOW, LOGPROB_FLOOR
from kernels.sampling_metadata import SamplingMetadata


def sample(
    logits: Tensor, metadata: SamplingMetadata, packed: Tensor | None = None, masks: Tensor | None = None
) -> Tensor:
    """Return the likeliest token of each row (N,), or a random one within min_p, top_k and top_p."""
    m = metadata
    arrays = (m.rows, m.temperature, m.top_k, m.top_p, m.min_p, m.seeds, m.samples, m.positions, m.masks)
    ids = torch.empty(len(m.rows), dtype=torch.int64)
    torch.ops.quire.sample(logits.contiguous(), *map(torch.from_numpy, arrays), masks, GREEDY_BELOW, ids)
    return ids


def penalties(
    logits: Tensor,
    tokens: Tensor,
    prompt_lens: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Return the logits with penalties, equal to the reference's bit for bit."""
    x = logits.clone(memory_format=torch.contiguous_format)
    ids = tokens.to(torch.int32).contiguous()
    torch.ops.quire.penalties(x, ids, prompt_lens, lengths, repetition, presence, frequency)
    return x


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities and ranks of the tokens, and the k likeliest with theirs."""
    rows = len(logits)
    values, ranks = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    top_ids, top_values = torch.empty((rows, k), dtype=torch.int64), torch.empty(rows, k)
    torch.ops.quire.logprobs(
        logits.contiguous(), tokens.contiguous(), LOGPROB_FLOOR, values, ranks, top_ids, top_values
    )
    return values, ranks, top_ids, top_values

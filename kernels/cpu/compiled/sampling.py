"""Choosing tokens and their log-probabilities, compiled; formulas and rules stand with the references.

The same tokens as the references give: noise has the same bits, ties go to the lowest id. Sums of probabilities are
float64 here and there, but added in another order, and float32 exponentials of the unlikely tokens may differ in the
last bit, so a draw that falls within 1e-8 of a limit may be decided otherwise.
"""

import torch
from torch import Tensor

from kernels.reference.logprobs import FLOOR
from kernels.reference.sample import GREEDY_BELOW, Choices


def sample(logits: Tensor, choices: Choices) -> Tensor:
    """As the reference."""
    c = choices
    arrays = (c.rows, c.temperature, c.top_k, c.top_p, c.min_p, c.seeds, c.samples, c.positions)
    ids = torch.empty(len(c.rows), dtype=torch.int64)
    torch.ops.quire.sample(logits.contiguous(), *map(torch.from_numpy, arrays), GREEDY_BELOW, ids)
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
    """As the reference, to the bit."""
    x = logits.clone(memory_format=torch.contiguous_format)
    known = tokens.to(torch.int32).contiguous()
    torch.ops.quire.penalties(x, known, prompt_lens, lengths, repetition, presence, frequency)
    return x


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference."""
    rows = len(logits)
    chosen, ranks = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    ids, values = torch.empty((rows, k), dtype=torch.int64), torch.empty(rows, k)
    torch.ops.quire.logprobs(logits.contiguous(), tokens.contiguous(), FLOOR, chosen, ranks, ids, values)
    return chosen, ranks, ids, values

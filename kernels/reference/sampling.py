"""Sampling: penalties, filters of logits, random sampling, and log-probabilities.

    logits ─▶ temperature ─▶ min_p ─▶ top_k ─▶ top_p ─▶ draw by noise (gumbel.py)

A row's token depends only on that row's logits and parameters. top_k and top_p run only for rows that use them, and on
candidates instead of the whole vocabulary. The number of candidates follows from the row's own parameters. Operations
on many rows at once are exact for each row, or sum in float64.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.gumbel import gumbel
from kernels.sampling_metadata import Ints, SamplingMetadata

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, like 0: the lowest id of the maximum."""

CANDIDATE_COUNTS = (64, 256, 4096)
"""Numbers of candidates to which top_k and top_p are applied, before the whole vocabulary is sorted. 32 rows of 49,152
logits take 4, 5 and 20 ms, and 135 ms to sort."""

LOGPROB_FLOOR = -9999.0
"""Replaces lower log-probabilities and -inf, which JSON cannot represent."""


def pack_metadata(metadata: SamplingMetadata) -> None:
    """Return None: the parameters are read on the host."""


def sample(
    logits: Tensor, metadata: SamplingMetadata, packed: Tensor | None = None, masks: Tensor | None = None
) -> Tensor:
    """Return the likeliest token of each row (N,), or a random one within min_p, top_k and top_p."""
    if masks is not None:
        logits, metadata = _masked(logits, metadata, masks)
    is_greedy = metadata.temperature < GREEDY_BELOW
    if is_greedy.all():
        return greedy(logits)[_to_device(logits, metadata.rows)]
    tokens = torch.empty(len(metadata), dtype=torch.int64, device=logits.device)
    if is_greedy.any():
        tokens[_to_device(logits, is_greedy)] = greedy(logits[_to_device(logits, metadata.rows[is_greedy])])
    tokens[_to_device(logits, ~is_greedy)] = _sample_random(logits, metadata.subset(~is_greedy))
    return tokens


def _masked(logits: Tensor, metadata: SamplingMetadata, masks: Tensor) -> tuple[Tensor, SamplingMetadata]:
    """Return logits (N, V), a row a token, -inf where its mask does not allow one, and the parameters for them."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    is_allowed = (masks[:, ids // 32] >> (ids % 32)) & 1 == 1
    any_token = torch.ones_like(is_allowed[:1])
    of_tokens = torch.cat((is_allowed, any_token))[_to_device(logits, metadata.masks)]  # -1 is the last row
    rows = logits[_to_device(logits, metadata.rows)]
    return rows.masked_fill(~of_tokens, -torch.inf), replace(metadata, rows=np.arange(len(metadata)))


def _sample_random(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    z = temperature(logits[_to_device(logits, metadata.rows)], _to_device(logits, metadata.temperature))
    if (metadata.min_p > 0).any():
        z = min_p(z, _to_device(z, metadata.min_p))
    is_filtered = (metadata.top_k > 0) | (metadata.top_p < 1)
    counts = np.where(is_filtered, _first_counts(metadata, z.shape[-1]), 0)
    tokens = torch.empty(len(z), dtype=torch.int64, device=z.device)
    for count in np.unique(counts).tolist():
        mask = counts == count
        part, subset = z if mask.all() else z[_to_device(z, mask)], metadata.subset(mask)
        ids = _sample_candidates(part, subset, count) if count else gumbel(part, None, *_key(z, subset))
        tokens[_to_device(z, mask)] = ids
    return tokens.clamp_(max=z.shape[-1] - 1)  # `gumbel` gives rows of NaN no valid id


def _first_counts(metadata: SamplingMetadata, vocab: int) -> Ints:
    """Return the number of candidates to begin with for each row (N,): enough for top_k, or a guess for top_p."""
    index = np.searchsorted(CANDIDATE_COUNTS, np.where(metadata.top_k > 0, metadata.top_k, CANDIDATE_COUNTS[1]))
    return np.array([*CANDIDATE_COUNTS, vocab])[index]


def _sample_candidates(z: Tensor, metadata: SamplingMetadata, count: int) -> Tensor:
    """Sample within top_k and top_p from the best `count` tokens, or from more if those are not enough."""
    vocab = z.shape[-1]
    count = min(count, vocab)
    best, ids = top_k(z, count)
    limit = np.where(metadata.top_k > 0, metadata.top_k, vocab)
    within = torch.arange(count, device=z.device) < _to_device(z, limit)[:, None]
    best = best.masked_fill(~within, -torch.inf)
    done = (limit <= count) | (count == vocab)
    has_top_p = metadata.top_p < 1
    if has_top_p.any():
        masses = np.where(has_top_p, metadata.top_p, np.inf)
        kept, complete = top_p(best, _to_device(z, masses), _total_mass(z, best, limit, count))
        best = best.masked_fill(~kept, -torch.inf)
        done |= complete.cpu().numpy() & (limit == vocab)  # with top_k, the total mass is not known yet
    if done.all():
        return gumbel(best, ids, *_key(z, metadata))
    tokens = torch.empty(len(z), dtype=torch.int64, device=z.device)
    if done.any():
        rows = _to_device(z, done)
        tokens[rows] = gumbel(best[rows], ids[rows], *_key(z, metadata.subset(done)))
    rows = _to_device(z, ~done)
    larger_count = next((larger for larger in CANDIDATE_COUNTS if larger > count), vocab)
    tokens[rows] = _sample_candidates(z[rows], metadata.subset(~done), larger_count)
    return tokens


def _total_mass(z: Tensor, best: Tensor, limit: Ints, count: int) -> Tensor:
    """Return Σ exp(z) (N,) float64 over the tokens that top_k leaves; wrong for rows whose limit exceeds `count`."""
    inside = best.double().exp().sum(-1)
    if (limit <= count).all():
        return inside
    return torch.where(_to_device(z, limit <= count), inside, z.exp().sum(-1, dtype=torch.float64))


def _key(z: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor, Tensor]:
    return _to_device(z, metadata.seeds), _to_device(z, metadata.samples), _to_device(z, metadata.positions)


def _to_device(like: Tensor, array: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def greedy(logits: Tensor) -> Tensor:
    """Return the likeliest ids (S,) int64 of `logits` (S, V), a tie going to the lowest id."""
    return logits.argmax(-1)  # torch documents that it returns the first of several maxima


def temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return z = (x - max(x)) / temperature, a new (S, V), from `logits` (S, V) and `temperatures` (S,) > 0.

    Subtracting first keeps small temperatures from overflow: what leaves the range is -inf, as it should be.
    """
    peak = logits.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)  # a row with no token left stays -inf instead of NaN
    return (logits - peak).div_(temperatures[:, None])


def min_p(z: Tensor, thresholds: Tensor) -> Tensor:
    """Keep the tokens whose probability is at least `thresholds` (S,), in [0, 1], times the likeliest's.

    `z` (S, V) has each row's maximum at 0; returns a new (S, V), -inf where dropped. p / p_max = exp(z), so that no
    softmax is needed.
    """
    lowest = thresholds.double().log().float()  # float64 gives the same bits on every device
    return z.masked_fill(z < lowest[:, None], -float("inf"))


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return values (S, k) and ids (S, k) int64 of the k largest in each row of `x` (S, V) float32, k ≤ V.

    They are sorted, best first, ties in the order of ids. torch.topk does not define which of several equal entries it
    returns, nor their order. Two sorts of the k entries define the order. If a tie crosses the k-th place, the row is
    computed again with unique keys.
    """
    if k == x.shape[-1]:
        return x.sort(dim=-1, descending=True, stable=True)
    values, ids = torch.topk(x, k, dim=-1)
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    if k:
        crossing = (x >= values[:, -1:]).sum(-1) > k
        if bool(crossing.any()):
            ids[crossing] = _top_k_by_keys(x[crossing], k)
            values = x.gather(-1, ids)
    return values, ids


def _top_k_by_keys(x: Tensor, k: int) -> Tensor:
    """Return ids of the k largest, by int64 keys that all differ: the value's order above, the reversed id below."""
    bits = (x + 0.0).view(torch.int32).long()  # adding makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, ~bits - 2**31, bits)  # integers in the order of the floats
    ids = torch.arange(x.shape[-1], device=x.device)
    return torch.topk((ordered << 32) - ids, k, dim=-1).indices


def top_p(z: Tensor, limits: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the smallest set of the likeliest tokens whose probability is at least `limits` (S,): the nucleus.

    `z` (S, C) are the best C tokens, best first; a limit is in (0, 1), or inf to keep all; `totals` (S,) float64 are
    the sums of exp(z) over the rows' whole distributions. Return a bool mask (S, C), always true in the first column,
    and a bool (S,): whether the nucleus lies within the C tokens. The sums are float64, so that they don't depend on
    the order in which a device adds.
    """
    mass = z.double().exp().cumsum(-1)
    needed = (limits.double() * totals)[:, None]
    kept = (mass < needed).roll(1, -1)
    kept[:, 0] = True
    return kept, mass[:, -1] >= needed[:, 0]


def penalties(
    logits: Tensor,
    tokens: Tensor,
    prompt_lens: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Return the logits with repetition, presence and frequency penalties.

    for each token in prompt or output:  x ← x / repetition if x > 0 else x * repetition
    for each token in the output:        x ← x - frequency * (times in the output) - presence
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    is_token = positions < lengths[:, None]
    ids = torch.where(is_token, tokens, tokens[:, :1]).long()  # the padding repeats a token that is there anyway
    in_output = (is_token & (positions >= prompt_lens[:, None])).int()
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device).scatter_add_(1, ids, in_output)
    count = counts.gather(1, ids)
    x = logits.gather(1, ids)
    x = torch.where(x > 0, x / repetition[:, None], x * repetition[:, None])
    x = x - frequency[:, None] * count - presence[:, None] * (count > 0)
    return logits.scatter(1, ids, x)  # a token's several entries all carry the same value


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log p(token) = x[token] - log Σ exp(x), the token's rank, and the k likeliest tokens with theirs."""
    total = logits.logsumexp(-1, keepdim=True)
    x = logits.gather(-1, tokens[:, None])
    lower_ids = torch.arange(logits.shape[-1], device=logits.device) < tokens[:, None]
    rank = 1 + (logits > x).sum(-1) + ((logits == x) & lower_ids).sum(-1)
    values, ids = top_k(logits, k)
    return _floor(x - total)[:, 0], rank, ids, _floor(values - total)


def _floor(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=LOGPROB_FLOOR, neginf=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)

"""The margin rule: how far two runs of one sequence must have the same tokens if their bits may differ.

The bits may differ on the reference kernels; on the compiled ones runs must be equal (equality.py). Arithmetic in
another order moves logits a little. If the choice of a token depended on less than that, another choice is correct too,
and from there on the two sequences have different contexts. So a run is compared with an undisturbed one up to the
first position at which the undisturbed run's choice was close: at which the runner-up, noise included, was within
`TOLERANCE`, or could have been if top_k or top_p had cut one token earlier or later.

This module samples each token again, from the reported log-probabilities and the noise that the seed stands for
(kernels.reference.gumbel). So the comparison checks the sampling rules too. The choice counts as close if tokens that
are not reported, or those that share one draw of noise, might have won. The module knows nothing of engines.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from kernels.reference.gumbel import REACH, TAIL, token_noise
from shared.protocol import Sampling, TokenLogprobs

TOLERANCE = 1e-3
"""How much the order of sums may change the difference of two logits, in float32.

Blocks of another size, in which attention adds up in another order, move the embedded model's logits by 4e-6 in the
median and by less than 5e-5 in 5,000 values. Twenty times that is safe even if other processors or batches add
differently, and only in one position of some hundreds are the two best candidates as near as this. `compare` allows
log-probabilities to move by as much.
"""

MOST = 0.9
"""Least share of positions that must be compared for a test to mean anything."""


class Run(NamedTuple):
    """A sequence's output. `entries` are the reported log-probabilities of each token and its alternatives."""

    sampling: Sampling
    tokens: list[int]
    entries: list[TokenLogprobs]
    sample: int = 0  # which of the request's sequences it is


class Comparison(NamedTuple):
    """The number of compared positions, of `total`, and the first difference among them, if any."""

    compared: int
    total: int
    difference: str = ""


def compare(undisturbed: Run, other: Run, vocab_size: int) -> Comparison:
    """Compare `other` with `undisturbed` as far as the rule goes. Lengths must be equal in any case."""
    total = len(undisturbed.tokens)
    if len(other.tokens) != total:
        return Comparison(0, total, f"{len(other.tokens)} tokens instead of {total}")
    for position, (token, entry) in enumerate(zip(undisturbed.tokens, undisturbed.entries, strict=True)):
        sure = sure_token(entry, undisturbed.sampling, position, vocab_size, undisturbed.sample)
        if sure is None:
            return Comparison(position, total)
        moved = abs(other.entries[position].logprob - entry.logprob)
        if sure != token:
            return Comparison(position, total, f"position {position}: {token} undisturbed, where {sure} was due")
        if other.tokens[position] != token:
            return Comparison(position, total, f"position {position}: {other.tokens[position]} instead of {token}")
        if moved > TOLERANCE:
            return Comparison(position, total, f"position {position}: the log-probability moved by {moved}")
    return Comparison(total, total)


def assert_same(undisturbed: Sequence[Run], others: Sequence[Run], vocab_size: int) -> None:
    """Fail if runs differ, or if the rule lets too few positions be compared. Print how many were."""
    result = [compare(run, other, vocab_size) for run, other in zip(undisturbed, others, strict=True)]
    differences = [f"run {index}: {one.difference}" for index, one in enumerate(result) if one.difference]
    assert not differences, differences
    compared, total = sum(one.compared for one in result), sum(one.total for one in result)
    alike = sum(run.entries == other.entries for run, other in zip(undisturbed, others, strict=True))
    print(f"{compared} of {total} positions compared; {alike} of {len(result)} runs are alike to the last bit")
    assert compared > MOST * total, f"only {compared} of {total} positions could be compared"


def sure_token(entry: TokenLogprobs, sampling: Sampling, position: int, vocab_size: int, sample: int = 0) -> int | None:
    """Return the token at output position `position` if no move of logits within the tolerance changes it, else None.

    `entry` lists at least two of the likeliest tokens. Raise ValueError if `sampling` edits logits in other ways
    than by temperature, top_k and top_p.
    """
    _check(sampling)
    if sampling.temperature == 0:
        first, second = entry.top_logprobs[:2]
        return entry.top_ids[0] if first - second > TOLERANCE else None
    slack = TOLERANCE / sampling.temperature
    best = entry.top_logprobs[0]
    scaled = [(logprob - best) / sampling.temperature for logprob in entry.top_logprobs]
    rest = _unlisted_mass(entry, sampling, vocab_size)
    kept = kept_of(scaled, sampling, rest, slack)
    near = sum(value >= -REACH - slack for value in scaled[: kept.perhaps])  # these may have noise of their own
    noise = _noise(sampling, sample, position, entry.top_ids[:near])
    scores = [value + each for value, each in zip(scaled, noise, strict=False)]
    winner = max(range(near), key=scores.__getitem__)
    rivals = scores[:winner] + scores[winner + 1 :]
    if kept.unlisted and scaled[-1] >= -REACH - slack:
        others = sorted(set(range(vocab_size)) - set(entry.top_ids))
        rivals.append(scaled[-1] + max(_noise(sampling, sample, position, others)))
    tail = math.fsum(math.exp(value) for value in scaled[: kept.perhaps] if value < -REACH + slack)
    tail += rest if kept.unlisted else 0.0
    if tail:
        rivals.append(math.log(tail) + _noise(sampling, sample, position, [TAIL])[0])
    certain = winner < kept.surely and scaled[winner] > -REACH + slack
    return entry.top_ids[winner] if certain and all(scores[winner] - rival > slack for rival in rivals) else None


def _noise(sampling: Sampling, sample: int, position: int, tokens: Sequence[int]) -> list[float]:
    seed = sampling.seed if sampling.seed < 2**63 else sampling.seed - 2**64
    noise = token_noise(torch.tensor(seed), torch.tensor(sample), torch.tensor(position), torch.tensor(tokens))
    return [float(value) for value in noise]


class Kept(NamedTuple):
    """The tokens that top_k and top_p leave: how many of the likeliest, and whether some that are not listed."""

    surely: int
    perhaps: int
    unlisted: bool


def kept_of(scaled: Sequence[float], sampling: Sampling, rest: float, slack: float) -> Kept:
    """Return what is left of tokens with logits `scaled`, best first, and unlisted ones whose Σ exp is 0 to `rest`."""
    listed = len(scaled)
    cut = 0 < sampling.top_k < listed
    surely = perhaps = sampling.top_k if cut else listed
    unlisted = not cut
    if sampling.top_p < 1:
        before = [0.0, *accumulate(math.exp(value) for value in scaled[:perhaps])]
        least, most = before[-1], before[-1] + (0.0 if cut else rest)
        blur = math.exp(slack)  # the factor by which the share of some tokens may change
        unlisted = unlisted and before[-1] < sampling.top_p * most * blur
        perhaps = sum(mass < sampling.top_p * most * blur for mass in before[:-1])
        surely = sum(mass * blur < sampling.top_p * least for mass in before[:-1])
    if sampling.top_p == 1 and sampling.top_k == 0:
        return Kept(surely, perhaps, unlisted)
    first_out = scaled[min(surely, listed - 1)]  # tokens as likely as this one may swap places with it
    last_in = scaled[perhaps - 1]
    surely = min(surely, sum(value > first_out + slack for value in scaled))
    perhaps = sum(value >= last_in - slack for value in scaled)
    return Kept(surely, perhaps, unlisted or perhaps == listed)


def _unlisted_mass(entry: TokenLogprobs, sampling: Sampling, vocab_size: int) -> float:
    """Return the largest weight that all unlisted tokens can have together, the likeliest token weighing 1.

    Their probabilities have a known sum, and none is above that of the last listed token. A temperature below 1 gives
    them the most weight if as many as possible equal it; a temperature above 1, if all are equal.
    """
    heat, count = sampling.temperature, vocab_size - len(entry.top_ids)
    first, last = entry.top_logprobs[0], entry.top_logprobs[-1]
    rest = max(0.0, 1.0 - math.fsum(map(math.exp, entry.top_logprobs)))
    if not rest or not count:
        return 0.0
    each = min(last, math.log(rest / count)) if heat > 1 else last
    number = count if heat > 1 else min(count, rest / math.exp(last))
    return number * math.exp((each - first) / heat)


def _check(sampling: Sampling) -> None:
    edits = (
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty - 1,
        sampling.min_tokens,
    )
    if any(edits) or sampling.logit_bias:
        raise ValueError(f"the margin rule knows temperature, top_k and top_p only, not {sampling}")

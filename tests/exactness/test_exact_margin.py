"""Tests the margin rule: it allows what rounding may change, and nothing else."""

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from kernels.reference.gumbel import REACH, token_noise
from kernels.reference.sampling import logprobs
from shared.params import MAX_LOGPROBS
from shared.protocol import Sampling, TokenLogprobs
from tests.exactness.embedded_model import SAMPLED
from tests.exactness.margin_rule import TOLERANCE, Comparison, Kept, Run, compare, kept_of, sure_token
from tests.worker.test_worker_sampler import Table

VOCAB = 400
GREEDY = Sampling(max_tokens=3, seed=0, temperature=0.0)


def greedy_run(tokens: list[int], gaps: list[float]) -> Run:
    """Return a greedy run of `tokens`, each ahead of token 99 by its margin."""
    entries = [TokenLogprobs(-0.1, 1, [token, 99], [-0.1, -0.1 - gap]) for token, gap in zip(tokens, gaps, strict=True)]
    return Run(GREEDY, tokens, entries)


def with_tokens(run: Run, tokens: list[int]) -> Run:
    return run._replace(tokens=tokens)


WIDE = greedy_run([5, 6, 7], [2.0, 2.0, 2.0])
CLOSE = greedy_run([5, 6, 7], [2.0, TOLERANCE / 2, 2.0])


def test_the_same_tokens_are_compared_in_full() -> None:
    assert compare(WIDE, WIDE, VOCAB) == Comparison(3, 3)


def test_another_token_at_a_wide_margin_is_a_fault() -> None:
    assert compare(WIDE, with_tokens(WIDE, [5, 99, 7]), VOCAB) == Comparison(1, 3, "position 1: 99 instead of 6")


def test_another_token_at_a_close_choice_is_none_nor_is_what_follows() -> None:
    assert compare(CLOSE, with_tokens(CLOSE, [5, 99, 8]), VOCAB) == Comparison(1, 3)
    assert compare(CLOSE, with_tokens(CLOSE, [8, 99, 8]), VOCAB).difference == "position 0: 8 instead of 5"


def test_a_token_lost_or_doubled_is_a_fault_whatever_the_margins() -> None:
    for tokens in ([5, 6], [5, 6, 6, 7]):
        assert compare(CLOSE, with_tokens(CLOSE, tokens), VOCAB).difference == f"{len(tokens)} tokens instead of 3"


def test_a_token_that_was_not_due_is_a_fault_of_the_undisturbed_run() -> None:
    wrong = with_tokens(WIDE, [5, 99, 7])
    assert compare(wrong, wrong, VOCAB).difference == "position 1: 99 undisturbed, where 6 was due"


def test_logits_that_move_further_than_the_tolerance_are_a_fault() -> None:
    entries = [msgspec.structs.replace(entry, logprob=-0.1 - 2 * TOLERANCE) for entry in WIDE.entries]
    assert compare(WIDE, WIDE._replace(entries=entries), VOCAB).difference.startswith(
        "position 0: the log-probability moved"
    )


def test_what_the_rule_does_not_know_is_refused() -> None:
    for edits in ({"presence_penalty": 0.5}, {"min_p": 0.1}, {"logit_bias": [(1, 1.0)]}, {"repetition_penalty": 1.1}):
        with pytest.raises(ValueError, match="margin rule"):
            sure_token(WIDE.entries[0], msgspec.structs.replace(GREEDY, **edits), 0, VOCAB)


def test_noise_counts_as_much_as_logits() -> None:
    sampling = Sampling(max_tokens=8, seed=2**64 - 3, top_k=2)
    first, second = (noise_of(sampling, position=5, token=token) for token in (7, 8))
    for lead, due in ((2 * TOLERANCE, 8), (TOLERANCE / 2, None), (-TOLERANCE / 2, None), (-2 * TOLERANCE, 7)):
        listed = sorted([(-9.0 - first, 7), (-9.0 - second + lead, 8), (-99.0, 9)], reverse=True)
        entry = TokenLogprobs(-9.0, 1, [id for _, id in listed], [logprob for logprob, _ in listed])
        assert sure_token(entry, sampling, 5, VOCAB) == due


def noise_of(sampling: Sampling, *, position: int, token: int) -> float:
    key = (torch.tensor(value) for value in (sampling.seed - 2**64, 0, position, token))
    return token_noise(*key).item()


def test_a_token_that_may_or_may_not_have_noise_of_its_own_is_not_sure() -> None:
    seeds = torch.arange(200_000)
    first, second = (token_noise(seeds, *(torch.tensor(value) for value in (0, 5, token))) for token in (7, 8))
    seed = int((second - first > REACH + 0.1).nonzero()[0])  # such that 8 wins though it is so far behind
    sampling = Sampling(max_tokens=8, seed=seed, top_k=2)
    for behind, due in ((REACH - 0.05, 8), (REACH - TOLERANCE / 2, None), (REACH + TOLERANCE / 2, None)):
        entry = TokenLogprobs(0.0, 1, [7, 8, 9], [0.0, -behind, -99.0])
        assert sure_token(entry, sampling, 5, VOCAB) == due


def test_who_is_kept_at_the_edges() -> None:
    slack = 0.01
    by_count = Sampling(max_tokens=1, seed=0, top_k=2)
    assert kept_of([0.0, -1.0, -2.0], by_count, 0.0, slack) == Kept(2, 2, False)
    assert kept_of([0.0, -1.0, -1.0 - slack / 2], by_count, 0.0, slack) == Kept(1, 3, True)
    assert kept_of([0.0, -1.0, -1.0 - slack / 2, -2.0], by_count, 0.0, slack) == Kept(1, 3, False)
    by_mass = Sampling(max_tokens=1, seed=0, top_k=3, top_p=2 / 3 + 1e-3)  # the first has two thirds
    thirds = [0.0, math.log(0.3), math.log(0.2), -9.0]
    assert kept_of(thirds, by_mass, 0.0, slack) == Kept(1, 2, False)
    assert kept_of(thirds, by_mass, 0.0, slack / 100) == Kept(2, 2, False)
    unbounded = msgspec.structs.replace(by_mass, top_k=0, top_p=0.9)
    assert kept_of(thirds, unbounded, 0.0, slack / 100) == Kept(3, 3, False)
    assert kept_of(thirds, unbounded, 0.2, slack / 100).unlisted


@pytest.mark.parametrize("params", [{"temperature": 0.0}, *SAMPLED, {"top_k": 30, "top_p": 0.6}, {"temperature": 1.4}])
def test_a_sure_token_is_drawn_however_logits_move_within_the_tolerance(params: dict[str, Any]) -> None:
    outcomes = draws(crowded_logits, params)
    sure = sum(due is not None for due, _ in outcomes)
    assert all(tokens == {due} for due, tokens in outcomes if due is not None)
    assert sure > len(outcomes) / 3
    if params == {"temperature": 0.0}:  # it is needed: some choices do change
        assert any(len(tokens) > 1 for _, tokens in outcomes)


def test_where_the_draw_takes_what_is_not_listed_nothing_is_sure() -> None:
    outcomes = draws(heavy_tail, {"temperature": 1.0})
    assert all(tokens == {due} for due, tokens in outcomes if due is not None)
    assert sum(due is not None for due, _ in outcomes) > len(outcomes) / 3
    assert sum(max(tokens) >= MAX_LOGPROBS for _, tokens in outcomes) > 0


def draws(logits_of: Callable[[torch.Generator], Tensor], params: dict[str, Any]) -> list[tuple[int | None, set[int]]]:
    """Return of each of many choices the sure token, and the tokens drawn when logits move by half the tolerance."""
    numbers, rng, table, result = (
        random.Random(str(params)),
        torch.Generator().manual_seed(1),
        Table(VOCAB, slots=1),
        [],
    )
    for position in range(80):
        sampling = Sampling(**{"max_tokens": 400, "seed": numbers.getrandbits(64), **params})
        table.enter(0, output=[0] * (position % 8), seed=sampling.seed, **params)
        logits = logits_of(rng)
        moves = [(torch.rand(logits.shape, generator=rng) - 0.5) * TOLERANCE for _ in range(4)]
        tokens = {table.draw(logits + move, [0])[0] for move in moves}
        result.append((sure_token(entry_of(logits), sampling, position % 8, VOCAB), tokens))
    return result


def heavy_tail(rng: torch.Generator) -> Tensor:
    """Return logits (1, VOCAB): a few likely tokens, and many below exp(-8) of them each, a tenth together."""
    tail = torch.full((VOCAB,), -8.2) - torch.rand(VOCAB, generator=rng) * 0.01
    tail[:MAX_LOGPROBS] = -torch.arange(MAX_LOGPROBS) * 0.5
    return tail[None]


def crowded_logits(rng: torch.Generator) -> Tensor:
    """Return logits (1, VOCAB), the best of them a tenth of the tolerance to thousands of tolerances apart."""
    gaps = TOLERANCE * 10 ** (torch.rand(VOCAB, generator=rng) * 4.5 - 1)
    falling = 20 - gaps.cumsum(0)
    return falling[torch.randperm(VOCAB, generator=rng)][None]


def entry_of(logits: Tensor) -> TokenLogprobs:
    """Return the log-probabilities reported of one row of logits (1, V); the token does not matter."""
    logprob, rank, ids, values = logprobs(logits, torch.tensor([0]), MAX_LOGPROBS)
    return TokenLogprobs(logprob.item(), int(rank.item()), ids[0].tolist(), values[0].tolist())

"""The operations of sampling, each against its definition."""

import pytest
import torch
from torch import Tensor

from kernels.load import ops
from kernels.reference.gumbel import gumbel
from kernels.reference.sampling import LOGPROB_FLOOR, greedy, min_p, temperature, top_k, top_p
from tests.kernels.naive_gumbel import draw_by_levels

OPS = ops(torch.device("cpu"))
INF = float("inf")


def key(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(rows) * 977, torch.arange(rows) % 3, torch.arange(rows) % 7


def shifted(z: Tensor) -> Tensor:
    return z - z.amax(-1, keepdim=True)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("vocab", [1, 50, 1000])
def test_draws_agree_with_the_definition(spread: float, vocab: int) -> None:
    torch.manual_seed(0)
    z = shifted(torch.randn(200, vocab) * spread)
    seeds, samples, positions = key(200)
    expected = [draw_by_levels(z[row], int(seeds[row]), int(samples[row]), int(positions[row])) for row in range(200)]
    assert gumbel(z, None, seeds, samples, positions).tolist() == expected


def test_the_tail_is_reached() -> None:
    """40,000 tokens at -9 weigh 5, and as many at -18 next to nothing."""
    z = torch.cat((torch.zeros(1), torch.full((40_000,), -9.0), torch.full((40_000,), -18.0)))
    got = gumbel(z.expand(200, -1), None, *key(200))
    assert 140 < int((got > 0).sum()) < 190
    assert len(set(got.tolist())) > 140
    assert got.tolist()[:5] == [draw_by_levels(z, *(int(part[row]) for part in key(200))) for row in range(5)]


def test_draws_among_candidates_are_by_token_id() -> None:
    torch.manual_seed(1)
    z = shifted(torch.randn(100, 300) * 4)
    order = torch.stack([torch.randperm(300) for _ in range(100)])
    shuffled = z.gather(-1, order)
    assert torch.equal(gumbel(shuffled, order, *key(100)), gumbel(z, None, *key(100)))


def test_excluded_tokens_are_never_drawn() -> None:
    z = torch.full((50, 200), -INF)
    z[:, 150] = 0.0
    assert (gumbel(z, None, *key(50)) == 150).all()


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws and 9 tokens; 26.1 is the 0.1% point for 8 degrees of freedom."""
    logits = torch.tensor([0.0, -0.5, -1.0, -1.2, -2.0, -2.0, -2.5, -3.0, -3.5])
    draws = 20_000
    got = gumbel(logits.expand(draws, -1), None, torch.arange(draws), *(torch.zeros(draws, dtype=torch.int64),) * 2)
    expected = torch.softmax(logits.double(), -1) * draws
    chi_square = ((torch.bincount(got, minlength=9) - expected).square() / expected).sum()
    assert chi_square < 26.1


def test_light_tokens_have_their_share() -> None:
    """10.8 is the 0.1% point of chi-square for one degree of freedom."""
    z = torch.cat((torch.zeros(4), torch.full((2000,), -8.5)))
    draws = 3000
    seeds, zeros = torch.arange(draws), torch.zeros(draws, dtype=torch.int64)
    unlikely = int((gumbel(z.expand(draws, -1), None, seeds, zeros, zeros) >= 4).sum())
    share = float(torch.softmax(z.double(), -1)[4:].sum())
    assert 0.05 < share < 0.2
    assert (unlikely - draws * share) ** 2 / (draws * share * (1 - share)) < 10.8


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-INF, -INF, -1.0]])
    assert greedy(x).tolist() == [1, 0, 2]


@pytest.mark.parametrize("k", [0, 1, 5, 64, 299, 300])
def test_top_k_is_ordered_and_exact_under_ties(k: int) -> None:
    torch.manual_seed(2)
    x = torch.randint(-3, 4, (40, 300)).float()  # seven values: ties at every place
    x[0] = 0.0
    x[1, ::2] = -INF
    x[2] = torch.randn(300)
    x[3, 5], x[3, 6] = -0.0, 0.0
    values, ids = top_k(x, k)
    for row in range(40):
        expected = sorted(range(300), key=lambda token: (-x[row, token].item(), token))[:k]
        assert ids[row].tolist() == expected
        assert torch.equal(values[row], x[row, expected])


def test_temperature_shifts_and_never_overflows() -> None:
    x = torch.tensor([[1.0, 3.0, -INF], [1e30, -1e30, 0.0], [-INF, -INF, -INF]])
    z = temperature(x, torch.tensor([0.5, 1e-38, 1.0]))
    assert z[0].tolist() == [-4.0, 0.0, -INF]
    assert z[1].tolist() == [0.0, -INF, -INF]
    assert z[2].tolist() == [-INF] * 3


def test_min_p_keeps_what_is_likely_enough() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    z = (p / p.max()).log().expand(4, -1)
    kept = min_p(z, torch.tensor([0.0, 0.2, 0.5, 1.0])) > -INF
    assert kept.sum(-1).tolist() == [4, 3, 2, 1]


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    z = p.log().float().expand(5, -1)
    limits = torch.tensor([1e-8, 0.49, 0.51, 0.94, INF])
    kept, complete = top_p(z, limits, torch.ones(5, dtype=torch.float64))
    assert kept.sum(-1).tolist() == [1, 1, 2, 3, 4]
    assert complete.tolist() == [True, True, True, True, False]
    _, complete = top_p(z[:, :2], limits, torch.ones(5, dtype=torch.float64))
    assert complete.tolist() == [True, True, True, False, False]


def test_penalties_by_hand() -> None:
    x = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    tokens = torch.tensor([[0, 1, 1, 2, 2, 3], [3, 0, 3, 1, 1, 1]])  # prompt 0 1, output 1 2 2; prompt 3, output 0
    args = torch.tensor([2, 1]), torch.tensor([5, 2])
    off = torch.zeros(2)
    before = x.clone()
    repetition = OPS.penalties(x, tokens, *args, torch.full((2,), 2.0), off, off)
    assert repetition.tolist() == [[1.0, -4.0, 0.5, 0.5], [1.0, -2.0, 1.0, 0.25]]
    presence = OPS.penalties(x, tokens, *args, torch.ones(2), torch.full((2,), 0.5), off)
    assert presence.tolist() == [[2.0, -2.5, 0.5, 0.5], [1.5, -2.0, 1.0, 0.5]]
    frequency = OPS.penalties(x, tokens, *args, torch.ones(2), off, torch.full((2,), 0.5))
    assert frequency.tolist() == [[2.0, -2.5, 0.0, 0.5], [1.5, -2.0, 1.0, 0.5]]
    assert torch.equal(x, before)


def test_penalties_leave_masked_tokens_masked() -> None:
    x = torch.tensor([[-INF, 0.0]])
    one = torch.ones(1)
    out = OPS.penalties(x, torch.tensor([[0, 0]]), torch.tensor([1]), torch.tensor([2]), 2 * one, one, one)
    assert out.tolist() == [[-INF, 0.0]]


def test_logprobs() -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 50)
    x[0, 7] = x[0, 3] = x[0].max() + 1
    x[1, 4] = -INF
    logprob, rank, ids, values = OPS.logprobs(x, torch.tensor([7, 4, 9]), 3)
    expected = torch.log_softmax(x.double(), -1)
    torch.testing.assert_close(logprob[[0, 2]].double(), expected[[0, 2], [7, 9]], atol=1e-5, rtol=0)
    assert logprob[1] == LOGPROB_FLOOR
    assert rank.tolist() == [2, 50, int((x[2] > x[2, 9]).sum()) + 1]
    assert ids[0, :2].tolist() == [3, 7]
    torch.testing.assert_close(values.double(), expected.gather(-1, ids), atol=1e-5, rtol=0)
    assert OPS.logprobs(x, torch.tensor([7, 4, 9]), 0)[2].shape == (3, 0)

"""Choosing tokens: the compiled operations against the plain ones, token for token."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.load import ops, reference
from kernels.reference.sampling import logprobs, penalties, sample
from kernels.sampling_metadata import SamplingMetadata

OPS = ops(torch.device("cpu"))
INF = float("inf")
PARAMETERS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.2, 0, 0.9, 0.0),
    (1.0, 0, 0.95, 0.0),
    (3.0, 0, 0.999, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.8, 50, 1.0, 0.0),
    (0.8, 50, 0.7, 0.0),
    (5.0, 900, 0.5, 0.0),
    (2.0, 900, 1.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (4.0, 0, 0.9, 1e-4),
    (1.0, 10**6, 1e-8, 1.0),
]


def make_metadata(count: int, rows: np.ndarray | None = None) -> SamplingMetadata:
    """Return metadata of `count` rows, all `PARAMETERS` in turn, with seeds of 64 bits."""
    parameters = [PARAMETERS[index % len(PARAMETERS)] for index in range(count)]
    temperature, top_k, top_p, min_p = zip(*parameters, strict=True)
    random = np.random.default_rng(3)
    return SamplingMetadata(
        rows=np.arange(count) if rows is None else rows,
        temperature=np.array(temperature, np.float32),
        top_k=np.array(top_k, np.int64),
        top_p=np.array(top_p, np.float32),
        min_p=np.array(min_p, np.float32),
        seeds=random.integers(-(2**63), 2**63 - 1, count),
        samples=random.integers(0, 4, count),
        positions=random.integers(0, 5000, count),
        masks=np.full(count, -1),
    )


def logits(count: int, vocab: int, spread: float, *, tied: bool) -> Tensor:
    x = torch.randn(count, vocab, generator=torch.Generator().manual_seed(4)) * spread
    return (x * 4).round() / 4 if tied else x


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("vocab", [1, 5, 16, 1003, 6000])
def test_the_same_tokens_as_the_reference(vocab: int, spread: float, tied: bool) -> None:
    x, metadata = logits(8 * len(PARAMETERS), vocab, spread, tied=tied), make_metadata(8 * len(PARAMETERS))
    assert OPS.sample(x, metadata).tolist() == sample(x, metadata).tolist()


def test_rows_without_a_distribution_give_what_the_reference_gives() -> None:
    x = logits(4 * len(PARAMETERS), 100, 1.0, tied=False)
    for first, value in enumerate((float("nan"), INF, -INF)):
        x[first::4, 10:20] = value
    x[3::4] = -INF
    got = OPS.sample(x, make_metadata(len(x)))
    assert got.tolist() == sample(x, make_metadata(len(x))).tolist()
    assert ((got >= 0) & (got < 100)).all()


def test_masked_tokens_are_never_chosen() -> None:
    x = torch.full((len(PARAMETERS), 500), -INF)
    x[:, 321] = -3.0
    assert OPS.sample(x, make_metadata(len(PARAMETERS))).tolist() == [321] * len(PARAMETERS)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1003])
def test_tokens_outside_of_a_mask_are_never_sampled(vocab: int) -> None:
    """The other rows are as they would be without masks, and a row may be used with and without one."""
    count = 4 * len(PARAMETERS)
    x, random = logits(count, vocab, 2.0, tied=False), np.random.default_rng(vocab)
    is_allowed = random.random((3, vocab)) < [[0.02], [0.5], [1.0]]
    is_allowed[:, vocab // 2] = True
    padded = np.zeros((3, -(-vocab // 32) * 32), np.uint8)
    padded[:, :vocab] = is_allowed
    masks = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    without = make_metadata(count, random.integers(0, count, count))
    metadata = replace(without, masks=random.integers(-1, 3, count))
    masked = torch.from_numpy(np.concatenate((is_allowed, np.ones((1, vocab), bool)))[metadata.masks])
    tokens = OPS.sample(x, metadata, None, masks)
    assert masked.gather(1, tokens[:, None]).all()
    assert tokens.tolist() == sample(x, metadata, None, masks).tolist()
    alone = x[torch.from_numpy(metadata.rows)].masked_fill(~masked, -INF)
    assert tokens.tolist() == OPS.sample(alone, replace(without, rows=np.arange(count))).tolist()


def test_masks_are_checked() -> None:
    x, metadata = logits(2, 64, 1.0, tied=False), replace(make_metadata(2), masks=np.array([0, 1]))
    for masks in (None, torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 2)):
        with pytest.raises(RuntimeError, match="mask"):
            OPS.sample(x, metadata, None, masks)


def test_the_tail_is_drawn_from_as_in_the_reference() -> None:
    """40,000 tokens at -9 weigh 5, and as many at -18 next to nothing."""
    x = torch.cat((torch.zeros(1), torch.full((40_000,), -9.0), torch.full((40_000,), -18.0))).repeat(60, 1)
    one, zero = np.ones(60, np.float32), np.zeros(60, np.float32)
    metadata = SamplingMetadata(
        np.arange(60), one, np.zeros(60, np.int64), one, zero, *(np.arange(60),) * 3, np.full(60, -1)
    )
    got = OPS.sample(x, metadata)
    assert 30 < int((got > 0).sum()) < 60
    assert got.tolist() == sample(x, metadata).tolist()


def test_neighbours_order_and_threads_make_no_difference() -> None:
    """The bits of log-probabilities too."""
    rows = 4 * len(PARAMETERS)
    x = logits(rows, 3001, 2.0, tied=False)
    tokens = OPS.sample(x, make_metadata(rows))
    scores = OPS.logprobs(x, tokens, 5)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for take in (np.arange(rows)[::-1].copy(), np.arange(7), np.array([5]), np.array([9, 9, 2])):
                some = make_metadata(rows).subset(take)
                assert OPS.sample(x, some).tolist() == tokens[take].tolist()
                for part, whole in zip(OPS.logprobs(x[take], tokens[take], 5), scores, strict=True):
                    assert torch.equal(part, whole[take])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("k", [0, 1, 20, 1003])
@pytest.mark.parametrize("tied", [False, True])
def test_log_probabilities_agree_with_the_reference(k: int, tied: bool) -> None:
    x = logits(40, 1003, 5.0, tied=tied)
    x[0], x[1, 10:] = 1.0, -INF
    tokens = torch.randint(1003, (40,), generator=torch.Generator().manual_seed(5))
    for got, expected in zip(OPS.logprobs(x, tokens, k), logprobs(x, tokens, k), strict=True):
        assert got.dtype == expected.dtype
        if got.dtype == torch.int64:
            assert torch.equal(got, expected)
        else:
            torch.testing.assert_close(got, expected, atol=2e-6, rtol=3e-7)


def test_log_probabilities_of_broken_rows_are_the_floor() -> None:
    x = torch.zeros(3, 40)
    x[0, 5], x[1, 5], x[2] = float("nan"), INF, -INF
    tokens = torch.tensor([5, 5, 5])
    chosen, _, _, values = OPS.logprobs(x, tokens, 3)
    assert chosen.tolist() == logprobs(x, tokens, 3)[0].tolist()
    assert (values == chosen[:, None]).all()


def test_penalties_are_the_reference_s_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(20, 300, generator=generator) * 5
    x[:, 7] = -INF
    tokens = torch.randint(40, (20, 64), generator=generator, dtype=torch.int32)
    prompts = torch.randint(1, 20, (20,), generator=generator)
    args = (tokens, prompts, prompts + torch.arange(20) * 2, *torch.rand(3, 20, generator=generator) * 2 + 0.1)
    got = OPS.penalties(x, *args)
    assert torch.equal(got, penalties(x, *args))
    assert not torch.equal(got, x)
    assert torch.equal(OPS.penalties(x[3:4], *(arg[3:4] for arg in args)), got[3:4])


def test_an_odd_call_is_refused() -> None:
    if OPS is reference():
        pytest.skip("the plain kernels serve")
    with pytest.raises(RuntimeError, match="no such row"):
        OPS.sample(torch.zeros(2, 5), make_metadata(1, rows=np.array([2])))
    one, ids = torch.ones(1), torch.tensor([[9]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="no such token"):
        OPS.penalties(torch.zeros(1, 5), ids, one.long(), one.long(), one, one, one)
    with pytest.raises(RuntimeError, match="no such token"):
        OPS.logprobs(torch.zeros(1, 5), torch.tensor([5]), 1)

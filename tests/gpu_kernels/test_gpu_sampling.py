"""The GPU's choice of tokens, penalties and log-probabilities against the reference's.

Vocabularies are odd, and most are small: a program takes the interpreter milliseconds, and a row of 50,000 tokens has
100 of them.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.gpu import sampling as gpu
from kernels.gpu.launch import record
from kernels.gpu.sampling_parameters import pack_metadata
from kernels.reference import sampling as reference
from kernels.reference.gumbel import TAIL, token_noise
from kernels.reference.sampling import LOGPROB_FLOOR
from kernels.sampling_metadata import SamplingMetadata

# Rows without a distribution are part of these tests, and the interpreter's numpy warns of their arithmetic.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF, NAN = float("inf"), float("nan")
PARAMETERS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (0.9e-5, 3, 0.5, 0.5),
    (1.0, 0, 1.0, 0.0),
    (1.1e-5, 0, 1.0, 0.0),
    (0.2, 0, 0.9, 0.0),
    (1.0, 0, 0.95, 0.0),
    (3.0, 0, 0.999, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.8, 5, 1.0, 0.0),
    (0.8, 50, 0.7, 0.0),
    (5.0, 900, 0.5, 0.0),
    (2.0, 900, 1.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (4.0, 0, 0.9, 1e-4),
    (9.0, 7, 0.9, 0.3),
    (1.0, 10**12, 1e-8, 1.0),
]


def metadata(count: int, parameters: list[tuple[float, int, float, float]] = PARAMETERS) -> SamplingMetadata:
    """Return metadata of `count` tokens of as many rows, `parameters` in turn, with seeds of 64 bits."""
    temperature, top_k, top_p, min_p = zip(*(parameters[i % len(parameters)] for i in range(count)), strict=True)
    random = np.random.default_rng(count)
    return SamplingMetadata(
        rows=np.arange(count),
        temperature=np.array(temperature, np.float32),
        top_k=np.array(top_k, np.int64),
        top_p=np.array(top_p, np.float32),
        min_p=np.array(min_p, np.float32),
        seeds=random.integers(-(2**63), 2**63 - 1, count),
        samples=random.integers(0, 4, count),
        positions=random.integers(0, 5000, count),
        masks=np.full(count, -1),
    )


def normal(count: int, vocab: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def assert_same_tokens(x: Tensor, device: torch.device, parameters: SamplingMetadata | None = None) -> Tensor:
    parameters = parameters or metadata(len(x))
    tokens = gpu.sample(x.to(device), parameters)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == reference.sample(x, parameters).tolist()
    return tokens.cpu()


@pytest.mark.parametrize(("vocab", "spread"), [(1, 1.0), (2, 1.0), (61, 0.5), (1025, 0.5), (1201, 5.0)])
def test_tokens_are_the_reference_s(device: torch.device, vocab: int, spread: float) -> None:
    assert_same_tokens(normal(2 * len(PARAMETERS) if vocab > 2 else len(PARAMETERS), vocab, spread), device)


def test_ties_go_to_the_lowest_ids(device: torch.device) -> None:
    x = (normal(3 * len(PARAMETERS), 301, 1.5) * 2).round() / 2
    x[: len(PARAMETERS)] = normal(1, 301, 1.0).sign() * 0.0
    x[len(PARAMETERS) : 2 * len(PARAMETERS), ::3] = -INF
    assert_same_tokens(x, device)


def test_one_huge_logit_and_masked_ones(device: torch.device) -> None:
    x = normal(3 * len(PARAMETERS), 300, 1.0)
    x[: len(PARAMETERS), 257] = 1e38
    x[len(PARAMETERS) : 2 * len(PARAMETERS)] *= 1e38  # differences overflow
    x[2 * len(PARAMETERS) :] = -INF
    x[2 * len(PARAMETERS) :, 211] = -3.0
    tokens = assert_same_tokens(x, device)
    assert (tokens[: len(PARAMETERS)] == 257).all()
    assert (tokens[2 * len(PARAMETERS) :] == 211).all()


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_rows_without_a_distribution_give_what_the_reference_gives(device: torch.device, broken: float) -> None:
    x = normal(len(PARAMETERS), 100, 1.0)
    x[:, 10:20] = broken
    if broken == -INF:
        x[:] = broken
    tokens = assert_same_tokens(x, device)
    assert ((tokens >= 0) & (tokens < 100)).all()


def test_a_large_vocabulary_is_searched_in_a_list_and_in_the_row(device: torch.device) -> None:
    """The list is too long for a flat row, and does not reach down to the nucleus of a row with a heavy tail."""
    assert_same_tokens(normal(2, 49_999, 3.0), device, metadata(2, [PARAMETERS[5], PARAMETERS[9]]))
    flat = [(1.0, 0, 0.95, 0.0), (1.0, 6000, 1.0, 0.0)]
    assert_same_tokens(normal(2, 7_001, 0.2), device, metadata(2, flat))
    heavy_tail = torch.cat((torch.zeros(1), normal(1, 5000, 0.1)[0] - 9)).repeat(2, 1)
    assert_same_tokens(heavy_tail, device, metadata(2, [(1.0, 0, 0.7, 0.0), (1.0, 0, 0.99, 0.0)]))


def test_the_tail_is_drawn_from_at_every_level(device: torch.device) -> None:
    """Seeds are chosen for which the tail wins, as 3 of 10,000 do; 3,000 tokens are then the tail of the tail."""
    x = torch.cat((torch.zeros(1), torch.full((1,), -8.5), torch.full((3000,), -17.0)))
    seeds, zeros = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)
    tail = x[1:].double().exp().sum().log() + token_noise(seeds, zeros, zeros, zeros + TAIL)
    lucky = seeds[tail > token_noise(seeds, zeros, zeros, zeros)][:16].numpy()
    one, zero = np.ones(len(lucky), np.float32), np.zeros(len(lucky), np.int64)
    parameters = SamplingMetadata(np.arange(len(lucky)), one, zero, one, 0 * one, lucky, zero, zero, zero - 1)
    tokens = assert_same_tokens(x.repeat(len(lucky), 1), device, parameters)
    assert (tokens > 0).all()
    assert 0 < int((tokens > 1).sum()) < len(lucky)
    half = torch.cat((torch.zeros(1), torch.full((4000,), -8.5)))
    tokens = assert_same_tokens(half.repeat(12, 1), device, metadata(12, [(1.0, 0, 1.0, 0.0), (1.0, 3900, 1.0, 0.0)]))
    assert len(set(tokens.tolist())) > 2


@pytest.mark.parametrize("vocab", [33, 1201])
def test_masked_tokens_are_the_reference_s(device: torch.device, vocab: int) -> None:
    count = 2 * len(PARAMETERS)
    x, random = normal(count, vocab, 2.0), np.random.default_rng(vocab)
    masks = torch.from_numpy(random.integers(-(2**31), 2**31, (3, -(-vocab // 32)), np.int32))
    parameters = replace(
        metadata(count), rows=random.integers(0, count, count), masks=random.integers(-1, len(masks), count)
    )
    tokens = gpu.sample(x.to(device), parameters, None, masks.to(device)).tolist()
    assert tokens == reference.sample(x, parameters, None, masks).tolist()
    assert tokens != reference.sample(x, parameters).tolist()
    with pytest.raises(ValueError, match="masks must be"):
        gpu.sample(x.to(device), parameters, None, masks[:, 1:].to(device))
    for none in (None, masks[:1].to(device)):
        with pytest.raises(ValueError, match="none of the masks"):
            gpu.sample(x.to(device), parameters, None, none)


def test_only_rows_with_a_mask_are_copied(device: torch.device) -> None:
    """The others are read where they are, whatever lies in the memory for masked ones."""
    count, vocab = 4, 40
    x, masks = normal(count, vocab, 2.0), torch.full((1, 2), -1, dtype=torch.int32)
    parameters = replace(metadata(count), masks=np.array([-1, 0, -1, 0]))
    tokens = torch.from_numpy(pack_metadata(parameters))[: 4 * count].to(device)
    masked = gpu.mask_tokens(x.to(device), tokens, masks.to(device)).cpu()
    assert torch.equal(masked[[1, 3]], x[[1, 3]])
    spoilt = masked.clone()
    spoilt[[0, 2]] = NAN
    sampled = gpu.sample_packed(
        x.to(device),
        tokens,
        torch.from_numpy(pack_metadata(parameters))[4 * count :].to(device),
        True,
        True,
        spoilt.to(device),
    )
    assert sampled.tolist() == reference.sample(x, replace(parameters, masks=np.full(count, -1))).tolist()


def test_rows_are_shared_strided_and_independent(device: torch.device) -> None:
    wide = torch.full((9, 700), NAN)
    wide[:, 3:600] = normal(9, 597, 2.0)
    x = wide[:, 3:600]
    rows = np.array([8, 2, 2, 5, 0, 8, 7, 2])
    everything = metadata(len(rows))
    parameters = SamplingMetadata(rows, *list(vars(everything).values())[1:])
    tokens = gpu.sample(wide.to(device)[:, 3:600], parameters).tolist()
    assert tokens == reference.sample(x, parameters).tolist()
    assert gpu.sample(x.to(device).T.contiguous().T, parameters).tolist() == tokens
    for i in (1, 6):
        assert gpu.sample(x.to(device), parameters.subset(np.arange(len(rows)) == i)).tolist() == tokens[i : i + 1]
    nobody = np.zeros(len(rows), bool)
    assert gpu.sample(x.to(device), parameters.subset(nobody)).tolist() == []


def test_parameters_are_read_by_slot(device: torch.device) -> None:
    """The records of slots lie in any order, and records of tokens name them."""
    x, parameters = normal(len(PARAMETERS), 150, 2.0).to(device), metadata(len(PARAMETERS))
    words = torch.from_numpy(pack_metadata(parameters)).to(device)
    tokens, slots = words[: 4 * len(PARAMETERS)], words[4 * len(PARAMETERS) :]
    order = torch.randperm(len(PARAMETERS), generator=torch.Generator().manual_seed(2)).to(device)
    moved = torch.empty_like(slots).view(-1, 8)
    moved[order] = slots.view(-1, 8)
    tokens.view(-1, 4)[:, 1] = order
    assert gpu.sample_packed(x, tokens, moved.flatten(), True, True).tolist() == gpu.sample(x, parameters).tolist()


def test_nothing_waits_and_launches_are_few() -> None:
    """A call that waits for the device fails on the meta device."""
    x, ids = torch.empty(len(PARAMETERS), 150, device="meta"), torch.empty(len(PARAMETERS), dtype=torch.int64)
    ids, penalty = ids.to("meta"), x[:, 0]
    for parameters, kernels in (
        (PARAMETERS, ["_tile_maxima", "find_bounds", "score_tiles", "choose"]),
        (PARAMETERS[2:4], ["_tile_maxima", "score_tiles", "choose"]),
        (PARAMETERS[:2], ["_tile_maxima", "choose"]),
    ):
        with record() as launches:
            gpu.sample(x, metadata(len(x), parameters))
        assert [launch.kernel for launch in launches] == kernels
    with record() as launches:
        gpu.logprobs(x, ids, 20)
        gpu.penalties(x, ids[:, None].expand(-1, 9), ids, ids, penalty, penalty, penalty)
    assert len(launches) == 4


def test_odd_calls_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="no such row"):
        gpu.sample(torch.zeros(len(PARAMETERS) - 1, 5, device=device), metadata(len(PARAMETERS)))
    with pytest.raises(ValueError, match="float32"):
        gpu.sample(torch.zeros(1, 5, device=device, dtype=torch.float16), metadata(1))
    with pytest.raises(ValueError, match="a token a row"):
        gpu.logprobs(torch.zeros(2, 5, device=device), torch.zeros(1, device=device, dtype=torch.int64), 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_penalties_are_the_reference_s_to_the_bit(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    x = normal(5, 1201, 5.0)
    x[:, 7] = -INF
    lengths, prompts = torch.tensor([1, 1100, 40, 9, 700]), torch.tensor([1, 5, 39, 9, 2])
    tokens = torch.randint(60, (5, 1100), generator=generator, dtype=dtype)
    tokens[torch.arange(1100) >= lengths[:, None]] = -(2**31)  # the rest is anything
    arguments = (tokens, prompts, lengths, *torch.rand(3, 5, generator=generator) * 2 + 0.1)
    padded = torch.nn.functional.pad(tokens, (1, 2)).to(device)[:, 1:-2]
    before = x.to(device).clone()
    penalised = gpu.penalties(before, padded, *(argument.to(device) for argument in arguments[1:]))
    assert torch.equal(penalised.cpu(), reference.penalties(x, *arguments))
    assert torch.equal(before.cpu(), x)


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (1003, 0), (1003, 20), (2500, 7), (2500, 40)])
def test_log_probabilities_agree_with_the_reference(device: torch.device, vocab: int, k: int) -> None:
    x = (normal(6, vocab, 5.0) * 8).round() / 8
    x[0], x[1, 1:] = 1.0, -INF
    tokens = torch.randint(vocab, (6,), generator=torch.Generator().manual_seed(5))
    results = gpu.logprobs(x.to(device), tokens.to(device), k)
    for result, expected in zip(results, reference.logprobs(x, tokens, k), strict=True):
        assert result.dtype == expected.dtype
        if result.dtype == torch.int64:
            assert torch.equal(result.cpu(), expected)
        else:
            torch.testing.assert_close(result.cpu(), expected, atol=2e-6, rtol=3e-7)
    for one, whole in zip(gpu.logprobs(x[4:5].to(device), tokens[4:5].to(device), k), results, strict=True):
        assert torch.equal(one, whole[4:5])


def test_log_probabilities_of_broken_rows_are_the_floor(device: torch.device) -> None:
    x = torch.zeros(3, 40)
    x[0, 5], x[1, 5], x[2] = NAN, INF, -INF
    tokens = torch.tensor([5, 5, 5])
    chosen, ranks, _, values = gpu.logprobs(x.to(device), tokens.to(device), 3)
    assert chosen.tolist() == [LOGPROB_FLOOR] * 3
    assert ranks.tolist() == reference.logprobs(x, tokens, 3)[1].tolist()
    assert (values == LOGPROB_FLOOR).all()

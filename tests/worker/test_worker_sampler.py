"""Tests the sampler on scripted logits: order of the edits, ties, independence of neighbours, reproducibility."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.load import ops
from services.worker.logprobs import sampled_logprobs, stage_logprobs
from services.worker.sampler import Sampler, SamplingBatch
from services.worker.sequence_states import SequenceStates
from services.worker.transfers import StepBuffer
from shared.protocol import Configure, Epoch, NewSequence, Sampling, StepPlan, pack_tokens
from tests.kernels.naive_gumbel import draw_by_levels

EPOCH = Epoch(boot_id="test", count=1)
CPU = torch.device("cpu")
OPS = ops(CPU)


class Table:
    """A sampler whose slots a test fills."""

    def __init__(self, vocab: int, slots: int = 64) -> None:
        self.vocab = vocab
        sizes = Configure(
            epoch=EPOCH, block_size=16, num_blocks=4, max_num_seqs=slots, max_model_len=64, max_num_batched_tokens=512
        )
        self.states = SequenceStates(sizes, vocab, CPU)
        self.sampler = Sampler(self.states, OPS)
        self.lengths = np.zeros(slots, np.int64)

    def enter(
        self, slot: int, *, prompt: Sequence[int] = (0,), output: Sequence[int] = (), sample: int = 0, **params: Any
    ) -> None:
        sampling = Sampling(**({"max_tokens": 16, "seed": 0} | params))
        tokens = [*prompt, *output]
        sequence = NewSequence(
            slot=slot, tokens=pack_tokens(tokens), prompt_len=len(prompt), blocks=[], sampling=sampling, sample=sample
        )
        plan = StepPlan(epoch=EPOCH, step=0, rows=[], new_sequences=[sequence])
        self.states.stage(plan, StepBuffer(CPU)).apply(OPS)
        self.lengths[slot] = len(tokens)

    def draw(self, logits: Tensor, slots: Sequence[int], rows: Sequence[int] | None = None) -> list[int]:
        """Return a token for each of `slots`, from `rows` of the logits (by default one row each)."""
        indices = np.array(slots, np.int64)
        logit_rows = np.arange(len(slots)) if rows is None else np.array(rows, np.int64)
        batch = SamplingBatch(indices, self.lengths[indices], logit_rows)
        before = logits.clone()
        with torch.inference_mode():
            buffer = StepBuffer(CPU)
            staged = self.sampler.stage(batch, buffer)
            buffer.send()
            tokens = dict(zip(staged.batch.slots.tolist(), self.sampler.sample(logits, staged).tolist(), strict=True))
        assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
        return [tokens[slot] for slot in slots]


def test_masks_belong_to_the_tokens_of_sequences_with_a_grammar() -> None:
    """Edited rows come last, and their masks with them. A mask is among the edits: before the filters."""
    table = Table(64)
    for slot in range(6):
        penalty = 0.5 * (slot % 3 == 0)
        table.enter(slot, grammar="g" * (slot % 2), presence_penalty=penalty, top_p=0.5, min_tokens=2)
    batch = SamplingBatch(np.arange(6), table.lengths[:6], np.arange(6))
    buffer = StepBuffer(CPU)
    staged = table.sampler.stage(batch, buffer)
    buffer.send()
    assert sorted(staged.masked.slots.tolist()) == [1, 3, 5]
    assert table.sampler.num_required(staged.masked).tolist() == [2, 2, 2]
    masks = torch.zeros(3, 2, dtype=torch.int32)
    for row, slot in enumerate(staged.masked.slots.tolist()):
        masks[row, 0] = 1 << (10 + slot)
    tokens = table.sampler.sample(torch.zeros(6, 64), staged, masks)
    by_slot = dict(zip(staged.batch.slots.tolist(), tokens.tolist(), strict=True))
    assert [by_slot[slot] for slot in (1, 3, 5)] == [11, 13, 15]


def one(logits: Sequence[float], **params: Any) -> int:
    table = Table(len(logits))
    table.enter(0, **params)
    return table.draw(torch.tensor([list(logits)]), [0])[0]


def flat_draws(vocab: int, count: int = 50, **params: Any) -> list[int]:
    """Return the first tokens of `count` seeds, with all logits equal."""
    table = Table(vocab)
    for slot in range(count):
        table.enter(slot, **({"seed": slot} | params))
    return table.draw(torch.zeros(count, vocab), range(count))


def by_definition(logits: Tensor, sampling: Sampling, prompt: list[int], output: list[int], sample: int) -> int:
    """Sample one row by the documented order of edits, over the whole vocabulary, without any short cut."""
    x = logits.clone()
    for token, bias in sampling.logit_bias:
        x[token] += bias
    if len(output) < sampling.min_tokens:
        x[sampling.stop_token_ids] = -torch.inf
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        count = output.count(token)
        x[token] = x[token] - sampling.frequency_penalty * count - (sampling.presence_penalty if count else 0)
    if sampling.temperature == 0:
        return int(x.argmax())
    z = (x - x.max()) / torch.tensor(sampling.temperature)
    if sampling.min_p:
        z[z < torch.tensor(sampling.min_p).log()] = -torch.inf
    order = sorted(range(len(z)), key=lambda token: (-z[token].item(), token))
    kept = order[: sampling.top_k or None]
    p = torch.softmax(z[kept].double(), -1)
    before = p.cumsum(-1) - p
    kept = [token for token, mass in zip(kept, before.tolist(), strict=True) if mass < np.float32(sampling.top_p)]
    z[[token for token in range(len(z)) if token not in set(kept)]] = -torch.inf
    return draw_by_levels(z, sampling.seed - 2**64 * (sampling.seed >= 2**63), sample, len(output))


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {},
    {"temperature": 0.7, "seed": 2**64 - 1},
    {"temperature": 2.0, "min_p": 0.05},
    {"top_k": 1},
    {"top_k": 5, "temperature": 1.5},
    {"top_k": 64},
    {"top_k": 200, "top_p": 0.5},
    {"top_k": 1500, "temperature": 2.0},
    {"top_k": 1500, "top_p": 0.99, "temperature": 2.0},
    {"top_p": 0.1},
    {"top_p": 0.9, "min_p": 0.001},
    {"top_p": 0.999, "temperature": 1.9},
    {"frequency_penalty": 1.0, "top_k": 30},
    {"repetition_penalty": 0.8, "top_p": 0.8},
    {"logit_bias": [(3, 9.0), (7, -100.0)], "top_p": 0.95},
    {"min_tokens": 5, "stop_token_ids": [0, 1, 2, 3], "temperature": 0.3},
]


@pytest.fixture(scope="module")
def crowd() -> tuple[Table, Tensor, list[int]]:
    """Return three sequences of every kind, their logits, and the tokens that the definition gives."""
    generator = torch.Generator().manual_seed(5)
    table, rows, expected = Table(2500), [], []
    for slot in range(3 * len(KINDS)):
        params = {"seed": slot * 7919} | KINDS[slot % len(KINDS)]
        prompt = torch.randint(0, 2500, (5,), generator=generator).tolist()
        output = torch.randint(0, 20, (slot % 9,), generator=generator).tolist()
        row = torch.randn(2500, generator=generator) * (1 + slot % 3)
        row[output] += 5
        if slot % 2:
            row = row.bfloat16().float()  # ties everywhere
        table.enter(slot, prompt=prompt, output=output, sample=slot % 4, **params)
        rows.append(row)
        expected.append(by_definition(row, Sampling(**({"max_tokens": 16} | params)), prompt, output, slot % 4))
    return table, torch.stack(rows), expected


def test_every_kind_follows_the_definition(crowd: tuple[Table, Tensor, list[int]]) -> None:
    table, logits, expected = crowd
    assert table.draw(logits, range(len(expected))) == expected


def test_neighbours_and_order_make_no_difference(crowd: tuple[Table, Tensor, list[int]]) -> None:
    table, logits, expected = crowd
    generator = torch.Generator().manual_seed(6)
    for size in (1, 2, 3, 7, 20, 54) * 4:
        slots = torch.randperm(len(expected), generator=generator)[:size].tolist()
        assert table.draw(logits[slots], slots) == [expected[slot] for slot in slots]


def test_a_seeded_request_is_the_same_beside_any_other() -> None:
    """SMP-01: A alone, beside an unseeded B, and beside a seeded B."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(16, 300, generator=generator)

    def run(*neighbours: int) -> list[int]:
        table, output = Table(300), list[int]()
        for step in range(16):
            table.enter(5, output=output, seed=42, temperature=0.8)
            for slot, seed in enumerate(neighbours):
                table.enter(slot, output=[1] * step, seed=seed, temperature=1.0)
            others = torch.randn(len(neighbours), 300)
            slots = [*range(len(neighbours)), 5]
            output.append(table.draw(torch.cat((others, logits[step : step + 1])), slots)[-1])
        return output

    alone = run()
    assert len(set(alone)) > 5
    assert run(123456789) == run(7) == run(7, 7, 42) == alone


def test_samples_of_a_request_differ_and_repeat() -> None:
    """SMP-03: four children draw from the same row of logits, 20 times."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(9))

    def run(seed: int) -> list[list[int]]:
        table, outputs = Table(300), [list[int]() for _ in range(4)]
        for _ in range(20):
            for sample, output in enumerate(outputs):
                table.enter(sample, output=output, seed=seed, sample=sample)
            for output, token in zip(outputs, table.draw(logits, range(4), rows=[0] * 4), strict=True):
                output.append(token)
        return outputs

    first = run(1)
    assert len({tuple(output) for output in first}) == 4
    assert run(1) == first
    assert run(2) != first


def test_no_top_k_is_not_top_k_one() -> None:
    """SMP-06; the gateway lowers -1 to 0."""
    assert len(set(flat_draws(40, temperature=2.0, top_k=0))) > 10
    assert len(set(flat_draws(40, temperature=2.0))) > 10
    assert set(flat_draws(40, temperature=2.0, top_k=1)) == {0}


def test_all_ways_of_being_greedy_agree() -> None:
    """SMP-09, with ties on every row."""
    logits = torch.randint(0, 6, (30, 200), generator=torch.Generator().manual_seed(3)).float()
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.0, "top_p": 0.1},
        {"temperature": 0.0, "top_k": 50, "seed": 3},
    ]
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    for params in settings:
        table = Table(200)
        for slot in range(30):
            table.enter(slot, **params)
        assert table.draw(logits, range(30)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [{"temperature": t} for t in (1e-2, 1e-4, 1e-8, 1e-38, 1e-45)] + [{"top_p": 1e-8}, {"top_p": 1e-45}],
    ids=str,
)
def test_the_limit_of_sharp_distributions_is_greedy(params: dict[str, float], dtype: torch.dtype) -> None:
    """SMP-10. Rows whose two best are nearly equal are left out for temperatures that are not greedy by rule."""
    logits = (torch.randn(200, 200, generator=torch.Generator().manual_seed(4)) * 3).to(dtype).float()
    best = logits.topk(2).values
    if (temperature := params.get("temperature", 0)) >= 1e-4:
        logits = logits[best[:, 0] - best[:, 1] > 50 * temperature]
    logits = logits[:60]
    assert len(logits) == 60
    table = Table(200)
    for slot in range(len(logits)):
        table.enter(slot, seed=slot, **params)
    assert table.draw(logits, range(len(logits))) == logits.argmax(-1).tolist()


def test_penalties_on_scripted_ties() -> None:
    """SMP-13: X and Y are equal, X stands in the prompt only; then X was generated too."""
    tied = [0.0, 4.0, 4.0, 1.0]
    x, y = 1, 2
    greedy: dict[str, Any] = {"temperature": 0.0, "prompt": [x]}
    assert one(tied, **greedy) == x
    assert one(tied, **greedy, repetition_penalty=2.0) == y
    assert one(tied, **greedy, presence_penalty=2.0) == x
    assert one(tied, **greedy, frequency_penalty=2.0) == x
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert one(tied, **greedy, output=[x], **{penalty: 2.0}) == y
    ahead = [0.0, 5.0, 4.0, 1.0]
    assert one(ahead, **greedy, output=[x], frequency_penalty=0.6) == x
    assert one(ahead, **greedy, output=[x, x], frequency_penalty=0.6) == y
    assert one(ahead, **greedy, output=[x, x], presence_penalty=0.6) == x


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_wait_for_min_tokens(temperature: float) -> None:
    """SMP-20: the end is biased as far as it goes, and comes at once after six tokens."""
    for end in (3, 8):
        output: list[int] = []
        while end not in output:
            table = Table(10)
            table.enter(
                0,
                output=output,
                temperature=temperature,
                min_tokens=6,
                stop_token_ids=[3, 8],
                logit_bias=[(end, 100.0)],
            )
            output += table.draw(torch.zeros(1, 10), [0])
        assert len(output) == 7
        assert not {3, 8} & set(output[:-1])


def test_stop_tokens_beyond_the_logits_are_no_harm() -> None:
    assert one([0.0, 1.0], temperature=0.0, min_tokens=2, stop_token_ids=[1, 7]) == 0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [8, 4, 2, 1, 1]),
        ({"temperature": 0.5}, [64, 16, 4, 1, 1]),
        ({"top_k": 3}, [8, 4, 2, 0, 0]),
        ({"top_p": 0.7}, [8, 4, 0, 0, 0]),
        ({"min_p": 0.2}, [8, 4, 2, 0, 0]),
        ({"logit_bias": [(4, 2.0794415)]}, [8, 4, 2, 1, 8]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, Any], expected: list[float]) -> None:
    """Chi-square over 6,000 draws; 18.5 is the 0.1% point for 4 degrees of freedom."""
    draws, vocab = 6000, len(expected)
    table = Table(vocab, slots=draws)
    for slot in range(draws):
        table.enter(slot, seed=slot, **params)
    logits = torch.tensor([8.0, 4, 2, 1, 1]).log().expand(draws, -1)
    got = torch.bincount(torch.tensor(table.draw(logits, range(draws))), minlength=vocab).double()
    ideal = torch.tensor(expected).double() / sum(expected) * draws
    assert (got[ideal == 0] == 0).all()
    possible = ideal > 0
    assert ((got - ideal)[possible].square() / ideal[possible]).sum() < 18.5


def test_a_wide_nucleus_is_not_cut_at_the_candidates() -> None:
    got = flat_draws(5000, count=64, top_p=0.9)
    assert max(got) < 4500  # equal tokens enter the nucleus in the order of their ids
    assert sum(token > 1024 for token in got) > 20
    assert max(flat_draws(5000, count=64, top_k=3000)) in range(1024, 3000)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_top_k_beyond_the_vocabulary_is_none(top_p: float) -> None:
    for top_k in (40, 41, 10**6):
        assert flat_draws(40, top_k=top_k, top_p=top_p) == flat_draws(40, top_p=top_p)


def test_broken_logits_still_give_ids() -> None:
    for params in ({}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.1}):
        assert one([float("nan")] * 100, **params) in range(100)


def test_logprobs_are_of_the_raw_distribution() -> None:
    table = Table(5)
    table.enter(0, temperature=0.0, logprobs=2, logit_bias=[(4, 100.0)])
    table.enter(1, temperature=2.0, top_k=1)
    table.enter(2, temperature=0.0, logprobs=0)
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0, -1.0]] * 3)
    tokens = torch.tensor(table.draw(logits, [0, 1, 2]))
    assert tokens.tolist() == [4, 1, 1]
    buffer = StepBuffer(CPU)
    (staged,) = stage_logprobs(SamplingBatch(np.arange(3), np.ones(3, int), np.arange(3)), table.states, buffer)
    buffer.send()
    rows = sampled_logprobs(logits, tokens, staged, OPS)
    entries = dict(rows.entries(rows.columns))
    assert sorted(entries) == [0, 2]
    expected = torch.log_softmax(logits[0], -1).tolist()
    first, last = entries[0], entries[2]
    assert first.logprob == pytest.approx(expected[4], abs=1e-5)
    assert (first.rank, first.top_ids) == (5, [1, 2])
    assert first.top_logprobs == pytest.approx([expected[1], expected[2]], abs=1e-5)
    assert (last.rank, last.top_ids, last.top_logprobs) == (1, [], [])


def test_named_tokens_are_scored_where_others_have_the_likeliest() -> None:
    """In one step, in rows of different lengths."""
    table = Table(6)
    named = {0: [3, 5], 1: [], 2: [0], 3: []}
    for slot, ids in named.items():
        table.enter(slot, temperature=0.0, logprobs=2 if slot == 1 else 0 if ids else -1, logprob_token_ids=ids)
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0, -1.0, -torch.inf]] * 2 + [[-60.0, 40.0, 40.0, 1e-3, 30.0, 0.0]] * 2)
    tokens = torch.tensor(table.draw(logits, [0, 1, 2, 3]))
    buffer = StepBuffer(CPU)
    groups = stage_logprobs(SamplingBatch(np.arange(4), np.ones(4, int), np.arange(4)), table.states, buffer)
    buffer.send()
    entries = {
        slot: entry
        for group in groups
        for rows in [sampled_logprobs(logits, tokens, group, OPS)]
        for slot, entry in rows.entries(rows.columns)
    }
    assert {slot: entry.top_ids for slot, entry in entries.items()} == {0: [3, 5], 1: [1, 2], 2: [0]}
    expected = torch.log_softmax(logits.double(), -1)
    assert entries[0].top_logprobs == pytest.approx([expected[0, 3].item(), -9999.0], abs=1e-5)
    assert entries[2].top_logprobs == pytest.approx([expected[2, 0].item()], abs=1e-5)
    assert [entry.rank for entry in entries.values()] == [1, 1, 1]
    assert entries[0].logprob == pytest.approx(expected[0, 1].item(), abs=1e-5)

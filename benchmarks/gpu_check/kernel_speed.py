"""Part 3: each kernel at the shapes of a Llama of 8 billion parameters, beside its floor and torch's own operations."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from benchmarks.gpu_check.ceilings import Ceilings, gpu_ceilings
from benchmarks.gpu_check.report import NONE, Report, Row, compare_rates, compare_times
from benchmarks.gpu_check.settings import Prompts, Settings
from benchmarks.gpu_check.stopwatch import Call, Stopwatch
from kernels.batch_rows import BatchRows
from kernels.load import gpu
from kernels.sampling_metadata import SamplingMetadata

BLOCK_SIZE = 16
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""The largest relative error, of norms, that the order of sums and rounding explain."""

PEAKED = 6.0
"""Standard deviation of normal logits whose nucleus has few tokens, like a text's."""

DECODE_TARGETS = (0.8, 0.6)  # of the floor, for `Settings.decodes`
CHUNK_TARGET = 300 / 780  # of the rate of products: 300 TFLOP/s on an H200

SAMPLING: tuple[tuple[str, float, float, float, float | None], ...] = (
    ("greedy", 0.0, 1.0, PEAKED, 0.4),
    ("top-p", 1.0, 0.9, PEAKED, 0.15),
    ("top-p of flat logits", 1.0, 0.9, 1.0, None),
)
"""Name, temperature, top_p, the logits' standard deviation, and the target."""


class Bench(NamedTuple):
    """What all measurements share."""

    settings: Settings
    report: Report
    stopwatch: Stopwatch
    ceilings: Ceilings | None  # None on a CPU
    device: torch.device
    dtype: torch.dtype

    def floor(self, bytes_moved: float, flops: float = 0) -> float | None:
        return self.ceilings.floor(bytes_moved, flops) if self.ceilings else None

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


@torch.inference_mode()
def run(settings: Settings, report: Report) -> None:
    torch.manual_seed(0)
    device = torch.device(settings.device)
    stopwatch, ceilings = Stopwatch(device, settings.repeats), gpu_ceilings(settings)
    bench = Bench(settings, report, stopwatch, ceilings, device, getattr(torch, settings.dtype))
    for prompts, decode_target in zip(settings.decodes, DECODE_TARGETS, strict=True):
        with report.check(f"decode attention, {prompts}"):
            _measure_decodes(bench, prompts, decode_target)
    with report.check(f"chunk attention, 1 × {settings.chunk:,}"):
        _measure_chunk(bench)
    for method, temperature, top_p, spread, target in SAMPLING:
        with report.check(f"choosing tokens, {method}"):
            _measure_sampling(bench, method, temperature, top_p, spread, target)
    for rows in settings.row_counts:
        with report.check(f"norms and activations, {rows:,} rows"):
            _measure_elementwise(bench, rows)
        with report.check(f"batch-invariant product, {rows:,} rows"):
            _measure_invariant_product(bench, rows)
    int4_target = "≥ 200% of bf16's" if settings.is_gpu else NONE
    report.add(Row("int4 product, 4,096 → 14,336, 1 to 16 rows", "not built", target=int4_target))


# attention


class Paged(NamedTuple):
    """Sequences of equal length in a cache, in scattered blocks; the last queries of each."""

    q: Tensor  # (rows * queries, heads, dim)
    keys: Tensor
    values: Tensor
    tables: Tensor
    rows: BatchRows

    def contiguous(self, cache: Tensor) -> Tensor:
        """Return (rows, kv heads, positions, dim), as torch's attention takes keys and values."""
        pages = cache[self.tables.long()].transpose(1, 2)
        return pages.reshape(pages.shape[0], pages.shape[1], -1, pages.shape[-1])[:, :, : self.rows.lengths.max_length]


def _paged(bench: Bench, rows: int, queries: int, context: int) -> Paged:
    config = bench.settings.config
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    width = -(-context // BLOCK_SIZE)
    layout = gpu().kv_layout(1, kv_heads, dim, BLOCK_SIZE, bench.dtype)
    keys, values = layout.views(layout.allocate(rows * width, bench.device).normal_())[0]
    tables = torch.randperm(rows * width).view(rows, width).to(bench.device, torch.int32)
    offsets = torch.arange(0, rows * queries + 1, queries, dtype=torch.int32)
    starts = torch.full((rows,), context - queries, dtype=torch.int32)
    batch = BatchRows.of(offsets, starts, torch.arange(rows, dtype=torch.int32)).to(bench.device)
    return Paged(bench.randn(rows * queries, heads, dim), keys, values, tables, batch)


def _attend(case: Paged) -> Tensor:
    ops, (kv_heads, dim) = gpu(), (case.keys.shape[1], case.q.shape[2])
    plan = ops.plan_attention(case.rows, case.tables, block_size=BLOCK_SIZE, num_kv_heads=kv_heads)
    return ops.paged_attention(case.q, case.keys, case.values, plan, scale=dim**-0.5)


def _measure_decodes(bench: Bench, prompts: Prompts, target: float) -> None:
    case = _paged(bench, prompts.number, 1, prompts.tokens)
    q, keys, values = case.q[:, :, None], case.contiguous(case.keys), case.contiguous(case.values)

    def by_torch() -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    correct = _near(_attend(case), by_torch()[:, :, 0])
    seconds = bench.stopwatch.seconds(lambda: _attend(case))
    floor = bench.floor(keys.nbytes + values.nbytes + 2 * q.nbytes)
    name = f"decode attention, {prompts}"
    bench.report.add(compare_times(name, seconds, floor, at_least=target, correct=correct))
    bench.report.add(compare_times(f"{name}, beside SDPA", seconds, bench.stopwatch.seconds(by_torch)))


def _measure_chunk(bench: Bench) -> None:
    length = bench.settings.chunk
    case = _paged(bench, 1, length, length)
    q, keys, values = case.q.transpose(0, 1)[None], case.contiguous(case.keys), case.contiguous(case.values)

    def by_torch() -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)

    correct = _near(_attend(case), by_torch()[0].transpose(0, 1))
    seconds = bench.stopwatch.seconds(lambda: _attend(case))
    flops = 4 * length * (length + 1) // 2 * case.q.shape[1] * case.q.shape[2]
    name = f"chunk attention, 1 × {length:,}, causal"
    if bench.ceilings:
        reference = bench.ceilings.flops_per_second / 1e12
        rate = flops / seconds / 1e12
        bench.report.add(compare_rates(name, rate, reference, "TFLOP/s", at_least=CHUNK_TARGET, correct=correct))
    else:
        bench.report.add(compare_times(name, seconds, None, correct=correct))
    bench.report.add(compare_times(f"{name}, beside SDPA", seconds, bench.stopwatch.seconds(by_torch)))
    if bench.settings.is_gpu:
        with bench.report.check(f"{name}, beside varlen_attn"):
            varlen = bench.stopwatch.seconds(_varlen(case, keys, values))
            bench.report.add(compare_times(f"{name}, beside varlen_attn", seconds, varlen))
    else:
        bench.report.add(Row(f"{name}, beside varlen_attn", NONE))


def _varlen(case: Paged, keys: Tensor, values: Tensor) -> Call:
    """Return torch's attention over ragged rows, which only a GPU has."""
    k, v = (cache[0].transpose(0, 1).contiguous() for cache in (keys, values))
    ends = torch.tensor([0, len(k)], dtype=torch.int32, device=k.device)
    length = len(k)
    return lambda: varlen_attn(case.q, k, v, ends, ends, length, length, window_size=(-1, 0), enable_gqa=True)


def _near(result: Tensor, expected: Tensor) -> bool:
    """Return whether the relative error is small. NaN is not."""
    error = (result.double() - expected.double()).norm() / expected.double().norm()
    return bool(error <= TOLERANCE[result.dtype])


# sampling


def _measure_sampling(
    bench: Bench, method: str, temperature: float, top_p: float, spread: float, target: float | None
) -> None:
    rows, vocab = bench.settings.sampled_rows, bench.settings.config["vocab_size"]
    ops, logits = gpu(), torch.randn(rows, vocab, device=bench.device) * spread
    metadata = sampling_metadata(rows, temperature=temperature, top_p=top_p)
    words = ops.pack_metadata(metadata)
    assert words is not None
    packed = torch.from_numpy(words).to(bench.device)

    def by_torch() -> Tensor:
        return _sample_by_sort(logits, top_p) if temperature else logits.argmax(-1)

    tokens = ops.sample(logits, metadata, packed)
    correct = _is_in_nucleus(logits, tokens, top_p) if temperature else torch.equal(tokens, by_torch())
    seconds = bench.stopwatch.seconds(lambda: ops.sample(logits, metadata, packed))
    name = f"choosing {rows} tokens of {vocab:,}, {method}"
    bench.report.add(compare_times(name, seconds, bench.floor(logits.nbytes), at_least=target, correct=correct))
    torch_seconds = bench.stopwatch.seconds(by_torch, in_graph=not temperature)
    how = "a sort" if temperature else "argmax"
    bench.report.add(compare_times(f"{name}, beside torch's, by {how}", seconds, torch_seconds))


def sampling_metadata(rows: int, *, temperature: float, top_p: float) -> SamplingMetadata:
    """Return the same parameters for all rows, each with a seed of its own."""
    index = np.arange(rows)
    return SamplingMetadata(
        rows=index,
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.zeros(rows, np.int64),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.zeros(rows, np.float32),
        seeds=index * 977,
        samples=index * 0,
        positions=index,
        masks=np.full(rows, -1),
    )


def _sample_by_sort(logits: Tensor, top_p: float) -> Tensor:
    ordered, ids = logits.sort(descending=True)
    probabilities = ordered.softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < top_p
    races = torch.where(kept, probabilities, 0.0) / torch.empty_like(probabilities).exponential_()
    return ids.gather(-1, races.argmax(-1, keepdim=True))[:, 0]


def _is_in_nucleus(logits: Tensor, tokens: Tensor, top_p: float) -> bool:
    """Return whether the tokens that are likelier than each of `tokens` have less than the mass `top_p`."""
    probabilities = logits.double().softmax(-1)
    own = probabilities.gather(-1, tokens[:, None])
    above = torch.where(probabilities > own, probabilities, 0.0).sum(-1)
    return bool((above < top_p + 1e-5).all())


# norms, activations and products


def _measure_elementwise(bench: Bench, rows: int) -> None:
    ops, config = gpu(), bench.settings.config
    width, inner = config["hidden_size"], config["intermediate_size"]
    x, residual, gate_up = bench.randn(rows, width), bench.randn(rows, width), bench.randn(rows, 2 * inner)
    weight, eps = bench.randn(width), 1e-5
    cases = {
        "rms_norm": (
            lambda: ops.rms_norm(x, weight, eps),
            lambda: F.rms_norm(x, (width,), weight, eps),
            2 * x.nbytes,
        ),
        "add_rms_norm": (
            lambda: ops.add_rms_norm(x, residual, weight, eps)[0],
            lambda: F.rms_norm(x + residual, (width,), weight, eps),
            4 * x.nbytes,
        ),
        "silu_and_mul": (
            lambda: ops.silu_and_mul(gate_up),
            lambda: F.silu(gate_up[:, :inner]) * gate_up[:, inner:],
            gate_up.nbytes * 3 // 2,
        ),
    }
    for name, (ours, by_torch, bytes_moved) in cases.items():
        seconds, torch_seconds = bench.stopwatch.seconds(ours), bench.stopwatch.seconds(by_torch)
        check, correct = f"{name}, {rows:,} rows", _near(ours(), by_torch())
        bench.report.add(compare_times(check, seconds, bench.floor(bytes_moved), correct=correct))
        bench.report.add(compare_times(f"{check}, beside torch's", seconds, torch_seconds))


def _measure_invariant_product(bench: Bench, rows: int) -> None:
    config = bench.settings.config
    inputs, outputs = config["hidden_size"], 2 * config["intermediate_size"]
    x, weight = bench.randn(rows, inputs), bench.randn(outputs, inputs)
    ops = gpu(batch_invariant=True)
    packed = ops.pack_linear(weight)
    correct = _near(ops.linear(x, packed, None), F.linear(x, weight))
    seconds = bench.stopwatch.seconds(lambda: ops.linear(x, packed, None))
    torch_seconds = bench.stopwatch.seconds(lambda: F.linear(x, weight))
    name = f"batch-invariant product, {rows:,} rows, {inputs:,} → {outputs:,}, beside torch's"
    bench.report.add(compare_times(name, seconds, torch_seconds, correct=correct))

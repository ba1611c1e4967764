"""Part 5: what must be equal: graphs and eager steps, the GPU's choice of tokens and the CPU's, with --batch-invariant
the bits of a sequence in every batch and chunking, and two ranks and one, where there are two GPUs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu_check.kernel_speed import PEAKED, sampling_metadata
from benchmarks.gpu_check.offline import Driver, Output, measure_decodes, random_prompts, started_engine
from benchmarks.gpu_check.report import Report, compare_rates, count_equal
from benchmarks.gpu_check.settings import Settings
from kernels.cpu import extension
from kernels.cpu import ops as cpu_ops
from kernels.load import gpu, reference

INVARIANT_TARGET = 0.7  # of the default's decodes
NEAR_TIE = 0.1
"""A difference of log-probabilities that the order of sums may turn over, with activations of two bytes."""


class Measured(NamedTuple):
    """The outputs of an engine for the compared prompts, and its speed."""

    outputs: list[Output]
    tokens_per_second: float


def run(settings: Settings, report: Report) -> None:
    with report.check("choice of tokens"):
        _compare_samplers(settings, report)
    graphs = eager = None
    with report.check("decodes in graphs"):
        graphs = _measure(settings)
    with report.check("decodes without graphs"):
        eager = _measure(settings, enforce_eager=True)
    if graphs and eager:
        equal, total = count_equal_tokens(graphs.outputs, eager.outputs)
        report.add(count_equal("graphs beside eager steps", equal, total, "tokens"))
        rates = graphs.tokens_per_second, eager.tokens_per_second
        name = f"decode, batch {settings.compared_batch}, in graphs, beside eager steps"
        report.add(compare_rates(name, *rates, "tok/s"))
    with report.check("--batch-invariant"):
        _check_batch_invariance(settings, report, graphs)
    if settings.is_gpu and torch.cuda.device_count() < 2:
        report.note("Several ranks were not tried, since there is one GPU.")
        return
    with report.check("two ranks"):
        _compare_ranks(settings, report, graphs)


def _measure(settings: Settings, **options: Any) -> Measured:
    with started_engine(settings, **_options(settings, **options)) as started:
        if started.has_graphs == options.get("enforce_eager", False):
            raise RuntimeError(f"with {options}, graphs were {'' if started.has_graphs else 'not '}captured")
        driver = Driver(started.engine)
        return Measured(_generate(driver, settings), _decode_rate(driver, settings))


def _options(settings: Settings, **options: Any) -> dict[str, Any]:
    return {
        "max_num_seqs": settings.compared_batch,
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.compared_step,
        "kv_cache_memory": settings.compared_kv_gib,
        **options,
    }


def _prompts(settings: Settings) -> list[list[int]]:
    return random_prompts(settings.config, settings.compared_prompts)


def _generate(driver: Driver, settings: Settings) -> list[Output]:
    return driver.generate(_prompts(settings), max_tokens=settings.compared_tokens)


def _decode_rate(driver: Driver, settings: Settings) -> float:
    prompts = random_prompts(settings.config, [settings.context] * settings.compared_batch)
    return measure_decodes(driver, prompts, settings.decode_steps).tokens_per_second


def count_equal_tokens(ours: Sequence[Output], others: Sequence[Output]) -> tuple[int, int]:
    """Return how many tokens are equal, of those that must be.

    The steps have the same kernels and, unless the ranks differ, the same shapes. Where two tokens were as good as
    equally likely, either may be chosen, and what follows is not compared.
    """
    equal = total = 0
    for output, other in zip(ours, others, strict=True):
        for token, other_token, entry in zip(output.tokens, other.tokens, output.logprobs, strict=True):
            first, second = entry.top_logprobs[:2]
            if token != other_token and first - second < NEAR_TIE:
                break
            total += 1
            equal += token == other_token
            if token != other_token:
                break
    return equal, total


def _check_batch_invariance(settings: Settings, report: Report, default: Measured | None) -> None:
    """Run each prompt alone, and then all at once, where steps are larger and prompts are cut elsewhere."""
    options = _options(settings, batch_invariant=True)
    with started_engine(settings, **options) as started:
        driver, prompts = Driver(started.engine), _prompts(settings)
        together = _generate(driver, settings)
        alone = [driver.generate([prompt], max_tokens=settings.compared_tokens)[0] for prompt in prompts]
        equal = sum(map(bits_equal, together, alone))
        report.add(count_equal("--batch-invariant: bits alone and among others", equal, len(alone), "sequences"))
        rate = _decode_rate(driver, settings)
    name = f"--batch-invariant, decode, batch {settings.compared_batch}, beside the default"
    target = INVARIANT_TARGET if settings.is_gpu else None
    report.add(compare_rates(name, rate, default and default.tokens_per_second, "tok/s", at_least=target))


def _compare_ranks(settings: Settings, report: Report, one: Measured | None) -> None:
    """Run the prompts on two tensor parallel ranks, which exchange what they have by NCCL, or by Gloo on a CPU."""
    with started_engine(settings, **_options(settings, tensor_parallel_size=2)) as started:
        try:
            driver = Driver(started.engine)
            two = Measured(_generate(driver, settings), _decode_rate(driver, settings))
        finally:
            started.engine.close()
    if one:
        equal, total = count_equal_tokens(two.outputs, one.outputs)
        report.add(count_equal("two ranks beside one", equal, total, "tokens"))
    name = f"decode, batch {settings.compared_batch}, two ranks, beside one"
    report.add(compare_rates(name, two.tokens_per_second, one and one.tokens_per_second, "tok/s"))


def bits_equal(output: Output, other: Output) -> bool:
    """Return whether tokens and log-probabilities are the same to the last bit."""
    return output.tokens == other.tokens and output.logprobs == other.logprobs


def _compare_samplers(settings: Settings, report: Report) -> None:
    """Choose tokens of the same logits by every kind of sampling, here and on the CPU."""
    rows, vocab = settings.sampled_rows, settings.config["vocab_size"]
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * PEAKED
    index = np.arange(rows)
    metadata = replace(
        sampling_metadata(rows, temperature=1.0, top_p=1.0),
        temperature=np.array([0.0, 0.7, 1.0, 1.3], np.float32)[index % 4],
        top_k=np.array([0, 50, 0], np.int64)[index % 3],
        top_p=np.array([1.0, 0.9], np.float32)[index // 4 % 2],
        min_p=np.array([0.0, 0.0, 0.05, 0.0, 0.0], np.float32)[index % 5],
    )
    on_cpu = (cpu_ops if extension.load() else reference()).sample(logits, metadata)
    ours = gpu().sample(logits.to(settings.device), metadata).cpu()
    equal = int((ours == on_cpu).sum())
    report.add(count_equal("the GPU's choice of tokens beside the CPU's", equal, rows, "tokens"))

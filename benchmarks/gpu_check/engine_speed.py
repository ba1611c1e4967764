"""Part 4: the whole engine on a Llama of 8 billion parameters, offline and with random weights."""

import statistics
import time

import torch

from benchmarks.gpu_check.activities import idle_between_steps, record_activities
from benchmarks.gpu_check.ceilings import Ceilings, gpu_ceilings
from benchmarks.gpu_check.offline import (
    Driver,
    Started,
    measure_decodes,
    random_prompts,
    running_decodes,
    started_engine,
)
from benchmarks.gpu_check.report import MISSED, NONE, YES, Report, Row, compare_rates, time_text
from benchmarks.gpu_check.settings import Config, Prompts, Settings
from services.worker.config import WorkerConfig

GIB = 2**30
DECODE_TARGETS = {1: 0.65, 32: 0.7, 256: 0.65}  # of the floor, by batch
PREFILL_TARGET = 0.6
IDLE_TARGET = 50e-6  # seconds


def run(settings: Settings, report: Report) -> None:
    ceilings = gpu_ceilings(settings)
    options = {
        "max_num_seqs": max(*settings.batches, settings.compared_batch),
        "max_model_len": settings.max_model_len,
        "kv_cache_memory": settings.kv_gib,
    }
    began = time.perf_counter()
    with started_engine(settings, **options) as started:
        _report_start(started, time.perf_counter() - began, report)
        driver = Driver(started.engine)
        for batch in settings.batches:
            with report.check(f"decode, batch {batch}"):
                _measure_decode(driver, batch, ceilings, settings, report)
        for prompts in settings.prefills:
            with report.check(f"prefill, {prompts}"):
                _measure_prefill(driver, prompts, ceilings, settings, report)
        with report.check("idle between decode steps"):
            _measure_idle(driver, settings, report)
        with report.check("memory"):
            _report_memory(started, settings, report)
        _report_compilations(started, settings, report)


def decode_floor(ceilings: Ceilings, config: Config, batch: int, context: float, element_size: int) -> float:
    """Return the least seconds of a step: all matrices once, or their products, and then the keys and values."""
    matrices = _layer_parameters(config) + config["vocab_size"] * config["hidden_size"]
    products = ceilings.floor(matrices * element_size, 2 * matrices * batch)
    kv_vectors = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return products + ceilings.floor(batch * context * kv_vectors * element_size)


def prefill_floor(ceilings: Ceilings, config: Config, prompts: Prompts) -> float:
    """Return the least seconds of the products and the attention of whole prompts."""
    pairs = prompts.number * prompts.tokens * (prompts.tokens + 1) / 2
    heads = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    products = 2 * _layer_parameters(config) * prompts.number * prompts.tokens
    return ceilings.floor(0, products + 4 * pairs * heads)


def _layer_parameters(config: Config) -> int:
    """Return the numbers in all matrices of the layers."""
    width, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    return int(config["num_hidden_layers"] * width * (heads * dim + 3 * inner))


def _report_start(started: Started, seconds: float, report: Report) -> None:
    for phase, phase_seconds in started.phases.items():
        report.add(Row(f"start: {phase}", time_text(phase_seconds)))
    report.add(Row("start, all phases", time_text(seconds)))
    for text in started.log.lines[: started.lines_of_start]:
        report.note(text)


def _measure_decode(driver: Driver, batch: int, ceilings: Ceilings | None, settings: Settings, report: Report) -> None:
    config = settings.config
    prompts = random_prompts(config, [settings.context] * batch, seed=batch)
    decodes = measure_decodes(driver, prompts, settings.decode_steps)
    floor = None
    if ceilings:
        element_size = getattr(torch, settings.dtype).itemsize
        floor = batch / decode_floor(ceilings, config, batch, decodes.mean_context, element_size)
    name = f"decode, batch {batch}, context {decodes.mean_context:,.0f}"
    target = DECODE_TARGETS.get(batch)
    report.add(compare_rates(name, decodes.tokens_per_second, floor, "tok/s", at_least=target))


def _measure_prefill(
    driver: Driver, prompts: Prompts, ceilings: Ceilings | None, settings: Settings, report: Report
) -> None:
    seconds = []
    for seed in range(1 + min(settings.repeats, 3)):
        tokens = random_prompts(settings.config, [prompts.tokens] * prompts.number, seed=seed)
        began = time.perf_counter()
        driver.submit(tokens, max_tokens=1)
        driver.finish(prompts.number)
        seconds.append(time.perf_counter() - began)
    total = prompts.number * prompts.tokens
    rate = total / statistics.median(seconds[1:])
    floor = total / prefill_floor(ceilings, settings.config, prompts) if ceilings else None
    target = PREFILL_TARGET if prompts.number > 1 else None
    report.add(compare_rates(f"prefill, {prompts}", rate, floor, "tok/s", at_least=target))


def _measure_idle(driver: Driver, settings: Settings, report: Report) -> None:
    batch, steps = settings.compared_batch, settings.profiled_steps
    prompts = random_prompts(settings.config, [settings.context] * batch)
    with running_decodes(driver, prompts, steps + 4):
        for _ in range(2):
            driver.engine.step()

        def run_steps() -> None:
            for _ in range(steps):
                driver.engine.step()

        activities = record_activities(run_steps, torch.device(settings.device))
    idle = idle_between_steps(activities.on_device)
    name, measured = f"idle between decode steps, batch {batch}", statistics.median(idle) if idle else None
    if measured is None:  # a CPU has no activities of its own
        report.add(Row(name, NONE))
    else:
        ok = YES if measured <= IDLE_TARGET else MISSED
        report.add(Row(name, time_text(measured), "0", target=f"≤ {time_text(IDLE_TARGET)}", ok=ok))
    for what, count in (("on the device", len(activities.on_device)), ("launched by the host", activities.launches)):
        report.add(Row(f"kernels and copies of a decode step, {what}", f"{count / steps:.0f}" if count else NONE))


def _report_memory(started: Started, settings: Settings, report: Report) -> None:
    engine, info = started.engine, started.engine.runner.info
    pool = engine.limits.num_blocks * engine.limits.block_size
    size = pool * info.kv_bytes_per_token / GIB
    report.add(Row("KV pool", f"{pool:,} tokens, {size:.3g} GiB", f"{info.kv_memory / GIB:.3g} GiB for KV"))
    if not settings.is_gpu:
        report.add(Row("memory in use at the end, beside what was planned", NONE))
        return
    free, total = torch.cuda.mem_get_info()
    planned = total * WorkerConfig().gpu_memory_utilization
    used = total - free
    report.add(
        Row(
            "memory in use at the end, beside what was planned",
            f"{used / GIB:.1f} GiB",
            f"{planned / GIB:.1f} GiB",
            f"{used / planned:.0%}",
            "≤ 100%",
            YES if used <= planned else MISSED,
        )
    )


def _report_compilations(started: Started, settings: Settings, report: Report) -> None:
    """A step must not wait for the compiler, so all kernels are compiled at the start."""
    late = [text for text in started.log.lines[started.lines_of_start :] if text.startswith("compiled after the start")]
    if settings.is_gpu:
        report.add(Row("kernels compiled after the start", str(len(late)), target="0", ok=MISSED if late else YES))
        for text in late:
            report.note(text)

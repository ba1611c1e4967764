"""Formats results as a printed report and as JSON, with the names of `vllm bench serve`."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from quire.bench import metrics
from quire.bench.load import Run
from quire.bench.metrics import LatencyStats, Totals
from quire.bench.options import ServeOptions
from shared.errors import ConfigError

WIDTH = 50
MAX_MODEL_NAME = 100
"""Characters of the model's name in the name of a result file, since file names are limited to 255 bytes."""

DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""Keys that are written only with --save-detailed."""

TITLES = {
    "ttft": ("TTFT", "Time to first token"),
    "tpot": ("TPOT", "Time per output token, without the first"),
    "itl": ("ITL", "Inter-token latency"),
    "e2el": ("E2EL", "End-to-end latency"),
    "client_queue_time": ("Client Queue Time", "Waiting in this client"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "End-to-end latency with waiting in this client"),
}


class Result(NamedTuple):
    """The figures of a run."""

    run: Run
    concurrency: int | None
    totals: Totals
    latencies: dict[str, LatencyStats]  # those that are reported, by name


def summarize(
    run: Run,
    concurrency: int | None,
    request_rate: float,
    names: Sequence[str],
    percentiles: Sequence[float],
    goals: Mapping[str, float],
) -> Result:
    """Return the result of a run, with the latencies in `names`. `goals` are seconds by the latency's name.

    The time in the client's queue is reported only with a concurrency; the latency that includes it needs a rate too.
    """
    latencies = metrics.latencies(run.outcomes)
    if concurrency is None:
        del latencies["client_queue_time"]
    if concurrency is None or math.isinf(request_rate):
        del latencies["e2el_including_client_queue"]
    stats = {name: metrics.latency_stats(values, percentiles) for name, values in latencies.items() if name in names}
    return Result(run, concurrency, metrics.totals(run.outcomes, run.seconds, goals), stats)


def format_report(result: Result, request_rate: float) -> str:
    """Return the report as text. `request_rate` is in requests per second, infinite if requests are sent at once."""
    totals = result.totals
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line("Successful requests", totals.completed), _line("Failed requests", totals.failed)]
    if result.concurrency is not None:
        lines.append(_line("Maximum request concurrency", result.concurrency))
    if not math.isinf(request_rate):
        lines.append(_line("Request rate configured (RPS)", request_rate))
    lines += [
        _line("Benchmark duration (s)", result.run.seconds),
        _line("Total input tokens", totals.input_tokens),
        _line("Total generated tokens", totals.output_tokens),
        _line("Request throughput (req/s)", totals.request_throughput),
    ]
    if totals.request_goodput is not None:
        lines.append(_line("Request goodput (req/s)", totals.request_goodput))
    lines += [
        _line("Output token throughput (tok/s)", totals.output_throughput),
        _line("Peak output token throughput (tok/s)", totals.peak_output_throughput),
        _line("Peak concurrent requests", float(totals.peak_concurrency)),
        _line("Total token throughput (tok/s)", totals.total_token_throughput),
    ]
    for name, stats in result.latencies.items():
        short, title = TITLES[name]
        lines.append(f"{title:-^{WIDTH}}")
        lines += [_line(f"Mean {short} (ms)", stats.mean), _line(f"Median {short} (ms)", stats.median)]
        lines += [_line(f"P{percent:g} {short} (ms)", value) for percent, value in stats.percentiles.items()]
    return "\n".join([*lines, "=" * WIDTH])


def make_record(
    options: ServeOptions, result: Result, *, model: str, tokenizer: str, metadata: Mapping[str, str], now: datetime
) -> dict[str, Any]:
    """Return the result as it is written to a file."""
    head: dict[str, Any] = {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": options.num_prompts,
        **metadata,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": "inf" if math.isinf(options.burstiness) else options.burstiness,
        "max_concurrency": result.concurrency,
    }
    if options.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        head |= {name: getattr(options, name) for name in names}
    fields = head | _figures(result) | _per_request(result) | _latencies(result.latencies)
    return fields if options.save_detailed else {key: value for key, value in fields.items() if key not in DETAILS}


def result_path(options: ServeOptions, concurrency: int | None, model: str, now: datetime) -> Path:
    """Return the path of the result file."""
    folder = Path(options.result_dir or ".")
    if options.result_filename is not None:
        return folder / options.result_filename
    rate = f"{options.request_rate}qps"
    if options.ramp_up_strategy is not None:
        rate = f"ramp-up-{options.ramp_up_strategy}-{options.ramp_up_start_rps}qps-{options.ramp_up_end_rps}qps"
    suffix = "" if concurrency is None else f"-concurrency{concurrency}"
    name = model.rstrip("/").split("/")[-1][:MAX_MODEL_NAME]
    return folder / f"{options.label or options.backend}-{rate}{suffix}-{name}-{now:%Y%m%d-%H%M%S}.json"


def save(path: Path, record: Mapping[str, Any], *, append: bool) -> None:
    """Write a record, after the file's content if `append`. Raise `ConfigError` if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(("\n" if file.tell() else "") + json.dumps(record))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _line(name: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name + ':':<40} {shown:<10}".rstrip()


def _figures(result: Result) -> dict[str, Any]:
    totals = result.totals
    return {
        "duration": result.run.seconds,
        "completed": totals.completed,
        "failed": totals.failed,
        "total_input_tokens": totals.input_tokens,
        "total_output_tokens": totals.output_tokens,
        "request_throughput": totals.request_throughput,
        "request_goodput": totals.request_goodput,
        "output_throughput": totals.output_throughput,
        "total_token_throughput": totals.total_token_throughput,
    }


def _per_request(result: Result) -> dict[str, Any]:
    outcomes, totals = result.run.outcomes, result.totals
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_tokens if outcome.ok else 0 for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.started for outcome in outcomes],
        "queue_times": [outcome.queued for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
        "max_output_tokens_per_s": totals.peak_output_throughput,
        "max_concurrent_requests": totals.peak_concurrency,
        "rtfx": 0.0,  # vLLM's speed factor of audio
    }


def _latencies(latencies: Mapping[str, LatencyStats]) -> dict[str, float]:
    fields: dict[str, float] = {}
    for name, stats in latencies.items():
        fields |= {f"mean_{name}_ms": stats.mean, f"median_{name}_ms": stats.median, f"std_{name}_ms": stats.std}
        fields |= {f"p{percent:g}_{name}_ms": value for percent, value in stats.percentiles.items()}
    return fields

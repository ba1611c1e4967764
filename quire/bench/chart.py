"""Charts of results: one run over time and by percentile, or several runs by concurrency.

matplotlib is imported only when a chart is drawn.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.bench import metrics
from quire.bench.report import TITLES, Result
from shared.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (11.0, 4.5)  # inches
DOTS_PER_INCH = 130
PLOTTED = ("ttft", "tpot", "itl", "e2el")


def check_library() -> None:
    """Raise `ConfigError` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; `make install` does it")


def draw(path: str, results: Sequence[Result]) -> None:
    """Draw a chart into a file, .png or .svg by its suffix. Raise `ConfigError` if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    left, right = figure.subplots(1, 2)
    if len(results) == 1:
        _over_time(left, results[0])
        _by_percentile(right, results[0])
    else:
        _throughput(left, results)
        _latencies(right, results)
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from error


def _over_time(axes: "Axes", result: Result) -> None:
    timeline = metrics.Timeline([outcome for outcome in result.run.outcomes if outcome.ok])
    seconds = range(len(timeline.pieces))
    axes.step(seconds, timeline.pieces, where="post", label="output tokens/s")
    axes.set(title="Over time", xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))
    other: Any = axes.twinx()
    other.step(seconds, timeline.running, where="post", color="tab:orange", label="requests running")
    other.set(ylabel="requests running", ylim=(0, None))
    lines = [*axes.get_lines(), *other.get_lines()]
    names = [str(line.get_label()) for line in lines]
    axes.legend(lines, names, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)  # below, clear of the lines


def _by_percentile(axes: "Axes", result: Result) -> None:
    percents = np.linspace(0, 100, 101)
    latencies = metrics.latencies(result.run.outcomes)
    for name in PLOTTED:
        if latencies[name]:
            axes.plot(percents, np.percentile(np.array(latencies[name]) * 1000, percents), label=TITLES[name][0])
    axes.set(title="Latencies", xlabel="percentile", ylabel="ms", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()


def _throughput(axes: "Axes", results: Sequence[Result]) -> None:
    concurrencies = [result.concurrency or 0 for result in results]
    axes.plot(concurrencies, [result.totals.output_throughput for result in results], marker="o")
    axes.set(title="Throughput", xlabel="concurrency", ylabel="output tokens/s", ylim=(0, None))
    axes.grid(alpha=0.3)


def _latencies(axes: "Axes", results: Sequence[Result]) -> None:
    concurrencies = [result.concurrency or 0 for result in results]
    by_result = [metrics.latencies(result.run.outcomes) for result in results]
    for name, color in (("ttft", "tab:blue"), ("itl", "tab:green")):
        for percent, style in ((50, "-"), (99, "--")):
            values = [metrics.latency_stats(latencies[name], [percent]).percentiles[percent] for latencies in by_result]
            axes.plot(concurrencies, values, style, color=color, marker="o", label=f"{TITLES[name][0]} P{percent}")
    axes.set(title="Latencies", xlabel="concurrency", ylabel="ms", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()

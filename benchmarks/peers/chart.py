"""Draws throughput over concurrency of Quire and its peers: a panel for a model and a kind of weights."""

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.models import MIDDLE, SMALL
from benchmarks.peers.record import Record
from benchmarks.peers.workloads import steady

SIZE = (13.0, 6.5)  # inches


class Panel(NamedTuple):
    """A panel: its title, the model, and the lines."""

    title: str
    model: str
    peers: tuple[str, ...]


PANELS = (
    Panel("135 million weights, 16 bits", SMALL.key, ("quire-bf16", "vllm", "transformers")),
    Panel(
        "135 million weights, 8 and 4 bits",
        SMALL.key,
        ("quire-kv8", "quire-int8-kv8", "vllm-w8a8", "openvino-int8", "openvino-gguf", "llama.cpp-q8", "llama.cpp-q4"),
    ),
    Panel(
        "1.07 billion weights, 8 and 4 bits",
        MIDDLE.key,
        (
            "quire-int4-kv8",
            "quire-int8-kv8",
            "vllm-w8a8",
            "openvino-int8",
            "openvino-int4",
            "llama.cpp-q8",
            "llama.cpp-q4",
        ),
    ),
)


def draw(record: Record, path: Path) -> None:
    """Write an SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # keep text as text, and the file reproducible
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "peers"}):
        figure = Figure(figsize=SIZE, layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            _draw_panel(axes, record, panel)
        figure.savefig(path, metadata={"Date": None})


def _draw_panel(axes: Any, record: Record, panel: Panel) -> None:
    loads = steady(panel.model)
    for peer in panel.peers:
        points = [(one.concurrency, value) for one in loads if (value := record.median(panel.model, peer, one.name))]
        if points:
            ours, entry = peer.startswith("quire"), record.peers[peer]
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                linewidth=2.5 if ours else 1.2,
                linestyle="-" if ours else "--",
                label=f"{entry.title}, {entry.precision}",
            )
    axes.set(title=panel.title, xlabel="requests at a time", ylabel="output tokens/s", xscale="log", ylim=(0, None))
    ticks = [one.concurrency for one in loads]
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize="small", frameon=False)

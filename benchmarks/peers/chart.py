"""Draws throughput over concurrency of Quire and its peers: one panel for 16-bit weights, one for quantised ones."""

from pathlib import Path

from benchmarks.peers.record import Record
from benchmarks.peers.workloads import STEADY

SIZE = (11.0, 5.5)  # inches
PANELS = (
    ("16 bits", ("quire-bf16", "vllm", "transformers")),
    (
        "8 and 4 bits",
        ("quire", "quire-kv8", "quire-kv8-inside", "openvino-int8", "openvino-gguf", "llama.cpp-q8", "llama.cpp-q4"),
    ),
)


def draw(record: Record, path: Path) -> None:
    """Write an SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # keep text as text, and the file reproducible
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "peers"}):
        figure = Figure(figsize=SIZE, layout="constrained")
        for axes, (title, peers) in zip(figure.subplots(1, 2), PANELS, strict=True):
            for peer in peers:
                points = [(one.concurrency, value) for one in STEADY if (value := record.median(peer, one.name))]
                if points:
                    ours, entry = peer.startswith("quire"), record.peers[peer]
                    axes.plot(
                        *zip(*points, strict=True),
                        marker="o",
                        linewidth=2.5 if ours else 1.2,
                        linestyle="-" if ours else "--",
                        label=f"{entry.title}, {entry.precision}",
                    )
            axes.set(title=title, xlabel="requests at a time", ylabel="output tokens/s", xscale="log", ylim=(0, None))
            ticks = [one.concurrency for one in STEADY]
            axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
            axes.set_xticks([], minor=True)
            axes.grid(alpha=0.3)
            if axes.get_lines():
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize="small", frameon=False)
        figure.savefig(path, metadata={"Date": None})

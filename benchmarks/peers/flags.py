"""Declares the flags of the command, and says what they choose."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.environments import ROOT
from benchmarks.peers.models import LARGE, MIDDLE, MODELS, SMALL
from benchmarks.peers.roster import ROSTER, Peer
from benchmarks.peers.targets import needed
from benchmarks.peers.workloads import NAMES, WORKLOADS, Workload


def flag_parser(description: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, peers = parser.add_argument, [peer.key for peer in ROSTER]
    add("--folder", type=Path, default=ROOT / ".peers", help="where peers are installed")
    add("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    add("--model", nargs="+", choices=MODELS, default=[SMALL.key, MIDDLE.key], help="models to measure with")
    add("--large", action="store_true", help=f"measure with {LARGE.key} too, which needs 40 GB of disk")
    add("--only", nargs="+", choices=peers, metavar="NAME", help=f"who takes part: {', '.join(peers)}; unset: all")
    add("--workloads", nargs="+", choices=NAMES, metavar="NAME", help=f"which: {', '.join(NAMES)}; unset: all")
    add("--rounds", type=_positive, default=1)
    add("--first-round", type=_positive, default=1, help="its number: a later one adds to the figures of --merge")
    add("--scale", type=float, help="factor of the numbers of requests; 1, or 0.5 with --quick")
    add("--quick", action="store_true", help="only what most targets need")
    add("--merge", action="store_true", help="keep the figures so far, but for those that are measured again")
    add("--client", choices=("auto", "vllm", "quire"), default="auto", help="that asks servers")
    add("--setup", action="store_true", help="measure nothing; install who takes part, and make their models")
    add("--report", action="store_true", help="measure nothing; write the page and the chart anew")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def chosen_turns(args: argparse.Namespace) -> Iterator[tuple[str, Peer, list[Workload]]]:
    """Yield each model's peers with their workloads, as the flags ask for."""
    for model in [*args.model, *([LARGE.key] if args.large and LARGE.key not in args.model else [])]:
        for peer in ROSTER:
            if model in peer.models and (args.only is None or peer.key in args.only):
                workloads = [one for one in WORKLOADS[model] if _wanted(args, model, peer, one)]
                if workloads:
                    yield model, peer, workloads


def _wanted(args: argparse.Namespace, model: str, peer: Peer, workload: Workload) -> bool:
    named = args.workloads is None or workload.name in args.workloads
    # no target is for the large model, so that its quick run is a run with half the requests
    return named and (not args.quick or model == LARGE.key or workload.name in needed(model, peer.key))


def command_line(args: argparse.Namespace) -> str:
    """Return the command line without defaults, and without paths of this machine."""
    words, parser = ["python -m benchmarks.peers"], flag_parser()
    for name, value in vars(args).items():
        if isinstance(value, Path) or value == parser.get_default(name):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return " ".join(words)

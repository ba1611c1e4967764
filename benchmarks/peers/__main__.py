"""Measures Quire beside its peers on this machine.

Installs each peer in an environment of its own, starts each in turn, asks all of them the same, and writes a page of
ratios, a chart and every figure. Nothing else should run meanwhile: on two cores that is the greatest source of noise.

    python -m benchmarks.peers --quick                      # what most targets need, once, at half the requests
    python -m benchmarks.peers --rounds 2                   # everything, twice, in turns
    python -m benchmarks.peers --large                      # the model of 7.4 billion weights too
    python -m benchmarks.peers --quick --model 1b --only vllm-w8a8 quire-int8-kv8 --merge    # a part of a run
    python -m benchmarks.peers --report                     # the page and the chart anew, from the figures so far

What cannot be installed or started is named in the page, with the error, and left out.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from benchmarks.peers import vllm
from benchmarks.peers.chart import draw
from benchmarks.peers.checkpoint import bfloat16, count_weights
from benchmarks.peers.client import Client, ours, vllm_client
from benchmarks.peers.environments import ROOT, Skipped
from benchmarks.peers.launch import Place
from benchmarks.peers.models import LARGE, MIDDLE, MODELS, SMALL
from benchmarks.peers.record import Ceilings, Entry, Record, Weights, load, save
from benchmarks.peers.report import page
from benchmarks.peers.roster import ROSTER, Peer
from benchmarks.peers.targets import needed
from benchmarks.peers.turns import Turn, Turns
from benchmarks.peers.workloads import NAMES, WORKLOADS, Workload
from shared.hub.checkpoint import locate
from shared.hub.embedded import embedded_file
from shared.text.tokenizer import Tokenizer

QUICK = 0.5  # scale


def run(args: argparse.Namespace) -> Record:
    """Install the peers, then measure them in turns; write the figures after each turn."""
    folder, file = args.folder.resolve(), args.results / "peers.json"
    record = _record(args, file)
    chosen = list(_chosen(args))
    places = {key: _place(folder, key, record) for key in dict.fromkeys(model for model, _, _ in chosen)}
    prepared = (_prepared(places[model], peer, workloads, record) for model, peer, workloads in chosen)
    turns = [turn for turn in prepared if turn is not None]
    scale = args.scale or (QUICK if args.quick else 1.0)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        served = any(turn.peer.served for turn in turns)
        client = _client(args.client if served else "quire", folder, stack)  # ours starts at once
        if served and client.name not in record.clients:
            record.clients.append(client.name)
        taking = Turns(client, Tokenizer.load(locate("")), record, scale, Path(scratch))
        for round in range(args.first_round - 1, args.first_round - 1 + args.rounds):
            record.ceilings.append(_ceilings())
            for turn in turns:
                print(f"Round {round + 1}, {turn.place.model.key}: {turn.peer.key}", flush=True)
                try:
                    taking.take(turn, round)
                except Skipped as error:
                    _skip(record, turn.place, turn.peer, f"round {round + 1}: {error}")
                save(record, file)
    return record


def _record(args: argparse.Namespace, file: Path) -> Record:
    """Return the record to add figures to: with `--merge` the one in `file`. Exit if it is another machine's."""
    new = Record(date=f"{datetime.now():%Y-%m-%d}", machine=_machine())
    record = load(file) if args.merge and file.exists() else new
    if record.machine != new.machine:
        raise SystemExit(f"--merge: {file} has figures of {record.machine}, and this machine has {new.machine}")
    record.commands.append(_command(args))
    return record


def _chosen(args: argparse.Namespace) -> Iterator[tuple[str, Peer, list[Workload]]]:
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


def _place(folder: Path, key: str, record: Record) -> Place:
    """Return where a model is, and enter its size into the record."""
    model = MODELS[key]
    place = Place(folder, model, bfloat16(folder, model), len(os.sched_getaffinity(0)))
    layers, head = count_weights(place.checkpoint)
    total = layers + head
    four = {"4-bit": embedded_file().stat().st_size} if model.shape is None else {"int4": total // 2}
    record.models[key] = Weights(model.title, layers, head, {"bf16": 2 * total, "int8": total} | four)
    return place


def _prepared(place: Place, peer: Peer, workloads: list[Workload], record: Record) -> Turn | None:
    """Return the turn of a peer, or None if it cannot be installed here."""
    try:
        launch = peer.prepare(place)
    except Skipped as error:
        _skip(record, place, peer, str(error))
        return None
    record.peers[peer.key] = Entry(peer.title, peer.precision, peer.served, launch.version, launch.note)
    record.skipped.pop(_named(place, peer), None)
    return Turn(peer, place, launch, workloads)


def _client(name: str, folder: Path, stack: ExitStack) -> Client:
    """Return the client, which `stack` closes."""
    if name == "quire":
        return ours()
    try:
        return stack.enter_context(vllm_client(vllm.installed(folder), folder / "client.log"))
    except Skipped as error:
        if name == "vllm":
            raise SystemExit(f"--client vllm: {error}") from error
        print(f"vLLM's client cannot be had ({error}), so ours asks all", flush=True)
        return ours()


def _command(args: argparse.Namespace) -> str:
    """Return the command line without defaults, and without paths of this machine."""
    words, parser = ["python -m benchmarks.peers"], _parser()
    for name, value in vars(args).items():
        if isinstance(value, Path) or value == parser.get_default(name):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return " ".join(words)


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{len(os.sched_getaffinity(0))} cores of {name}"


def _ceilings() -> Ceilings:
    argv = [sys.executable, "-m", "benchmarks.ceilings", "--json"]
    ceilings: Ceilings = json.loads(subprocess.check_output(argv, cwd=ROOT))
    return ceilings


def _skip(record: Record, place: Place, peer: Peer, reason: str) -> None:
    print(f"{_named(place, peer)} is left out: {reason}", flush=True)
    reason = reason.replace(str(place.folder), ".peers").replace(str(ROOT), ".")
    record.skipped[_named(place, peer)] = reason


def _named(place: Place, peer: Peer) -> str:
    return f"{place.model.key} {peer.key}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    add("--report", action="store_true", help="measure nothing; write the page and the chart anew")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def main() -> None:
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what ends a running peer
    record = load(args.results / "peers.json") if args.report else run(args)
    (args.results / "peers.md").write_text(page(record), encoding="utf-8")
    draw(record, args.results / "peers.svg")
    print(page(record))


if __name__ == "__main__":
    main()

"""Measures Quire beside its peers on this machine.

Installs each peer in an environment of its own, starts each in turn, asks all of them the same, and writes a page of
ratios, a chart and every figure. Nothing else should run meanwhile: on two cores that is the greatest source of noise.

    python -m benchmarks.peers --quick                # what the targets need, once: some 25 minutes
    python -m benchmarks.peers --rounds 2             # everything, twice, in turns
    python -m benchmarks.peers --only quire vllm      # some of them; the names stand in roster.py
    python -m benchmarks.peers --report               # the page and the chart anew, from the figures of the last run

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
from typing import Any

from benchmarks.peers import vllm
from benchmarks.peers.chart import draw
from benchmarks.peers.checkpoint import checkpoint
from benchmarks.peers.client import Client, ours, vllm_client
from benchmarks.peers.environments import ROOT, Skipped
from benchmarks.peers.launch import Launch, Place
from benchmarks.peers.record import Entry, Record, load, save
from benchmarks.peers.report import page
from benchmarks.peers.roster import ROSTER, Peer
from benchmarks.peers.turns import Turns
from shared.hub.checkpoint import locate
from shared.hub.embedded import EMBEDDED, embedded_file
from shared.text.tokenizer import Tokenizer

QUICK = 0.5  # scale


def run(args: argparse.Namespace) -> Record:
    """Install the peers, then measure them in turns; write the figures after each turn."""
    folder = args.folder.resolve()
    place = Place(folder, EMBEDDED, checkpoint(folder), len(os.sched_getaffinity(0)))
    record = _empty(place, args)
    ready = list(_prepared(_chosen(args.only), place, record))
    scale = args.scale or (QUICK if args.quick else 1.0)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        client = _client(args.client, folder, stack)
        record.client = client.name
        turns = Turns(place, client, Tokenizer.load(locate("")), record, scale, args.quick, Path(scratch))
        for round in range(args.rounds):
            record.ceilings.append(_ceilings())
            for peer, launch in ready:
                print(f"Round {round + 1} of {args.rounds}: {peer.key}", flush=True)
                try:
                    turns.take(peer, launch, round)
                except Skipped as error:
                    _skip(record, place, peer, f"round {round + 1}: {error}")
                save(record, args.results / "peers.json")
    return record


def _prepared(peers: list[Peer], place: Place, record: Record) -> Iterator[tuple[Peer, Launch]]:
    """Yield the peers that can be installed and started here."""
    for peer in peers:
        try:
            launch = peer.prepare(place)
        except Skipped as error:
            _skip(record, place, peer, str(error))
            continue
        record.peers[peer.key] = Entry(peer.title, peer.precision, peer.served, launch.version, launch.note)
        yield peer, launch


def _chosen(only: list[str] | None) -> list[Peer]:
    keys = {peer.key for peer in ROSTER}
    if unknown := set(only or ()) - keys:
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: there are {' '.join(peer.key for peer in ROSTER)}")
    return [peer for peer in ROSTER if only is None or peer.key in only]


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


def _empty(place: Place, args: argparse.Namespace) -> Record:
    weights = (place.model / "model.safetensors").stat().st_size
    parameters = weights // 2
    return Record(
        date=f"{datetime.now():%Y-%m-%d}",
        command=_command(args),
        machine=_machine(place.threads),
        parameters=parameters,
        bytes={"bf16": weights, "int8": parameters, "4-bit": embedded_file().stat().st_size},
    )


def _command(args: argparse.Namespace) -> str:
    """Return the command line without paths of this machine."""
    flags = [f"--{name}={value}" for name in ("rounds", "scale", "client") if (value := getattr(args, name))]
    if args.quick:
        flags.append("--quick")
    return " ".join(["python -m benchmarks.peers", *flags, *(["--only", *args.only] if args.only else [])])


def _machine(threads: int) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{threads} cores of {name}"


def _ceilings() -> dict[str, dict[str, float]]:
    argv = [sys.executable, "-m", "benchmarks.ceilings", "--json"]
    ceilings: dict[str, Any] = json.loads(subprocess.check_output(argv, cwd=ROOT))
    return ceilings


def _skip(record: Record, place: Place, peer: Peer, reason: str) -> None:
    print(f"{peer.key} is left out: {reason}", flush=True)
    record.skipped[peer.key] = reason.replace(str(place.folder), ".peers").replace(str(ROOT), ".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="where peers are installed")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="take part; all, if unset")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scale", type=float, help="factor of the numbers of requests; 1, or 0.5 with --quick")
    parser.add_argument("--quick", action="store_true", help="only what targets and chart need")
    parser.add_argument("--client", choices=("auto", "vllm", "quire"), default="auto", help="that asks servers")
    parser.add_argument("--report", action="store_true", help="measure nothing; write the page and the chart anew")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what ends a running peer
    record = load(args.results / "peers.json") if args.report else run(args)
    (args.results / "peers.md").write_text(page(record), encoding="utf-8")
    draw(record, args.results / "peers.svg")
    print(page(record))


if __name__ == "__main__":
    main()

"""How fast is Quire beside its peers, on this machine?

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
from benchmarks.peers.client import Client, ours, vllms
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


def run(given: argparse.Namespace) -> Record:
    """Install, then measure in turns; the figures are written after each turn."""
    folder = given.folder.resolve()
    place = Place(folder, EMBEDDED, checkpoint(folder), len(os.sched_getaffinity(0)))
    record = _empty(place, given)
    ready = list(_prepared(_chosen(given.only), place, record))
    scale = given.scale or (QUICK if given.quick else 1.0)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        client = _client(given.client, folder, stack)
        record.client = client.name
        turns = Turns(place, client, Tokenizer.load(locate("")), record, scale, given.quick, Path(scratch))
        for round in range(given.rounds):
            record.ceilings.append(_ceilings())
            for peer, launch in ready:
                print(f"Round {round + 1} of {given.rounds}: {peer.key}", flush=True)
                try:
                    turns.take(peer, launch, round)
                except Skipped as error:
                    _skip(record, place, peer, f"round {round + 1}: {error}")
                save(record, given.results / "peers.json")
    return record


def _prepared(peers: list[Peer], place: Place, record: Record) -> Iterator[tuple[Peer, Launch]]:
    """Those that can be had here, once they are installed."""
    for peer in peers:
        try:
            launch = peer.prepare(place)
        except Skipped as error:
            _skip(record, place, peer, str(error))
            continue
        record.peers[peer.key] = Entry(peer.title, peer.precision, peer.served, launch.version, launch.note)
        yield peer, launch


def _chosen(only: list[str] | None) -> list[Peer]:
    known = {peer.key for peer in ROSTER}
    if unknown := set(only or ()) - known:
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: there are {' '.join(peer.key for peer in ROSTER)}")
    return [peer for peer in ROSTER if only is None or peer.key in only]


def _client(wanted: str, folder: Path, stack: ExitStack) -> Client:
    """The client, which `stack` ends."""
    if wanted == "quire":
        return ours()
    try:
        return stack.enter_context(vllms(vllm.installed(folder), folder / "client.log"))
    except Skipped as error:
        if wanted == "vllm":
            raise SystemExit(f"--client vllm: {error}") from error
        print(f"vLLM's client cannot be had ({error}), so ours asks all", flush=True)
        return ours()


def _empty(place: Place, given: argparse.Namespace) -> Record:
    weights = (place.model / "model.safetensors").stat().st_size
    parameters = weights // 2
    return Record(
        date=f"{datetime.now():%Y-%m-%d}",
        command=_command(given),
        machine=_machine(place.threads),
        parameters=parameters,
        bytes={"bf16": weights, "int8": parameters, "4-bit": embedded_file().stat().st_size},
    )


def _command(given: argparse.Namespace) -> str:
    """What was called, but for where things are on this machine."""
    flags = [f"--{name}={value}" for name in ("rounds", "scale", "client") if (value := getattr(given, name))]
    if given.quick:
        flags.append("--quick")
    return " ".join(["python -m benchmarks.peers", *flags, *(["--only", *given.only] if given.only else [])])


def _machine(threads: int) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{threads} cores of {name}"


def _ceilings() -> dict[str, dict[str, float]]:
    argv = [sys.executable, "-m", "benchmarks.ceilings", "--json"]
    found: dict[str, Any] = json.loads(subprocess.check_output(argv, cwd=ROOT))
    return found


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
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what ends a running peer
    record = load(given.results / "peers.json") if given.report else run(given)
    (given.results / "peers.md").write_text(page(record), encoding="utf-8")
    draw(record, given.results / "peers.svg")
    print(page(record))


if __name__ == "__main__":
    main()

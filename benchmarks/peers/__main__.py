"""Measures Quire beside its peers on this machine.

Installs each peer in an environment of its own, starts each in turn, asks all of them the same, and writes a page of
ratios, a chart and every figure. Nothing else should run meanwhile: on two cores that is the greatest source of noise.

    python -m benchmarks.peers --setup                      # install the peers and make their models, and no more
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
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from benchmarks.peers import vllm
from benchmarks.peers.chart import draw
from benchmarks.peers.checkpoint import bfloat16, count_weights
from benchmarks.peers.client import Client, ours, vllm_client
from benchmarks.peers.environments import ROOT, Skipped
from benchmarks.peers.flags import chosen_turns, command_line, flag_parser
from benchmarks.peers.launch import Place
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.models import MODELS
from benchmarks.peers.record import Ceilings, Entry, Record, Weights, load, save
from benchmarks.peers.report import page
from benchmarks.peers.roster import Peer
from benchmarks.peers.turns import Turn, Turns
from benchmarks.peers.workloads import Workload
from shared.hub.checkpoint import locate
from shared.hub.embedded import embedded_file
from shared.text.tokenizer import Tokenizer

QUICK = 0.5  # scale


def set_up(args: argparse.Namespace) -> None:
    """Install the peers and the client, and make the models, so that a later call begins to measure at once."""
    folder = args.folder.resolve()
    turns = _turns(args, folder, Record(date="", machine=""))
    if any(turn.peer.served for turn in turns):
        with ExitStack() as stack:
            _client(args.client, folder, stack)


def run(args: argparse.Namespace) -> Record:
    """Install the peers, then measure them in turns; write the figures after each turn."""
    folder, file = args.folder.resolve(), args.results / "peers.json"
    record = _record(args, file)
    turns = _turns(args, folder, record)
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
    new = Record(date=f"{datetime.now():%Y-%m-%d}", machine=describe_machine())
    record = load(file) if args.merge and file.exists() else new
    if record.machine != new.machine:
        raise SystemExit(
            f"--merge adds to figures of the same machine: those in {file} are of {record.machine},"
            f" and this machine is {new.machine}. Measure without --merge, or with --results into another folder"
        )
    record.date = new.date
    record.commands.append(command_line(args))
    return record


def _turns(args: argparse.Namespace, folder: Path, record: Record) -> list[Turn]:
    """Return the turns that the flags ask for, with everything installed. Exit if there are none."""
    chosen = list(chosen_turns(args))
    if not chosen:
        raise SystemExit("there is nothing to measure: those of --only do not take part, or not with these workloads")
    places = {key: _place(folder, key, record) for key in dict.fromkeys(model for model, _, _ in chosen)}
    prepared = (_prepared(places[model], peer, workloads, record) for model, peer, workloads in chosen)
    return [turn for turn in prepared if turn is not None]


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


def main() -> None:
    args = flag_parser(__doc__).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what ends a running peer
    if args.setup:
        set_up(args)
        return
    record = load(args.results / "peers.json") if args.report else run(args)
    (args.results / "peers.md").write_text(page(record), encoding="utf-8")
    draw(record, args.results / "peers.svg")
    print(page(record))


if __name__ == "__main__":
    main()

"""Gives a peer its turn: start it, warm it up, run its workloads and end it."""

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers.client import Client
from benchmarks.peers.launch import Launch, Place
from benchmarks.peers.processes import Running, busy, driving, serving
from benchmarks.peers.record import Measured, Record, Started
from benchmarks.peers.roster import Peer
from benchmarks.peers.workloads import NAMES, WARM_UP, Workload, write
from shared.text.tokenizer import Tokenizer

QUIET = 5.0  # per cent of the CPUs in use on a machine that does nothing else


class Turn(NamedTuple):
    """A peer with the model that it serves, how it starts, and what is asked of it."""

    peer: Peer
    place: Place
    launch: Launch
    workloads: Sequence[Workload]


class Turns(NamedTuple):
    """Runs turns with one client, tokenizer and record."""

    client: Client
    tokenizer: Tokenizer
    record: Record  # figures go here
    scale: float
    scratch: Path  # folder for the files of requests

    def take(self, turn: Turn, round: int) -> None:
        """Run a turn. Raise `Skipped` if the peer does not start or answer; earlier figures are kept."""
        model, peer, used = turn.place.model.key, turn.peer.key, busy()
        if used > QUIET:
            print(f"  others use {used:.0f}% of the CPUs, so these figures will be too low", flush=True)
        with self._running(turn) as running:
            self._measure(running, turn.place, WARM_UP, round)
            for workload in turn.workloads:
                requests, figures = self._measure(running, turn.place, workload, round)
                self.record.measure(Measured(model, peer, workload.name, round, requests, **figures))
                print(f"  {workload.name}: {figures['output_throughput']:.1f} tokens/s", flush=True)
            self.record.start(Started(model, peer, round, running.started, running.memory(), used))

    def _running(self, turn: Turn) -> AbstractContextManager[Running]:
        place, log = turn.place, turn.place.folder / f"{turn.place.model.key}.{turn.peer.key}.log"
        return serving(turn.launch, place.name, log) if turn.peer.served else driving(turn.launch, log)

    def _measure(self, running: Running, place: Place, workload: Workload, round: int) -> tuple[int, dict[str, float]]:
        """Return the number of requests, and their figures."""
        count, file = workload.scaled(self.scale), self.scratch / "requests.jsonl"
        # the same prompts for all, others in each round and workload: no cache knows them
        seed = round * 100 + NAMES.index(workload.name) if workload.name in NAMES else 99
        write(workload, count, seed, self.tokenizer, file)
        return count, self._figures(running, place, file, workload.concurrency)

    def _figures(self, running: Running, place: Place, file: Path, concurrency: int) -> dict[str, float]:
        if running.url:
            return of_client(self.client.measure(running.url, place.name, place.checkpoint, file, concurrency))
        return of_program(running.job(file=str(file), concurrency=concurrency))


def of_client(result: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a result of `bench serve`."""
    return {
        "output_throughput": result["output_throughput"],
        "input_throughput": result["total_input_tokens"] / result["duration"],
        "ttft": result["median_ttft_ms"],
        "itl": result["median_itl_ms"],
        "itl_p99": result["p99_itl_ms"],
    }


def of_program(result: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a result of a program of `inside/`."""
    itls = result["itls"] or [0.0]  # with one token a request there are none
    return {
        "output_throughput": result["output_tokens"] / result["seconds"],
        "input_throughput": result["input_tokens"] / result["seconds"],
        "ttft": 1000 * statistics.median(result["ttfts"]),
        "itl": 1000 * statistics.median(itls),
        "itl_p99": 1000 * float(np.percentile(itls, 99)),
    }

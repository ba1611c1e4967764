"""Gives a peer its turn: start it, warm it up, run every workload and end it."""

import statistics
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.client import Client
from benchmarks.peers.launch import Launch, Place
from benchmarks.peers.processes import Running, driving, serving
from benchmarks.peers.record import Measured, Record, Started
from benchmarks.peers.roster import Peer
from benchmarks.peers.workloads import WARM_UP, WORKLOADS, Workload, write
from shared.text.tokenizer import Tokenizer


class Turns(NamedTuple):
    """Runs turns with one client, tokenizer and record."""

    place: Place
    client: Client
    tokenizer: Tokenizer
    record: Record  # figures go here
    scale: float
    quick: bool
    scratch: Path  # folder for the files of requests

    def take(self, peer: Peer, launch: Launch, round: int) -> None:
        """Run a turn. Raise `Skipped` if the peer does not start or answer; earlier figures are kept."""
        with self._running(peer, launch) as running:
            self._measure(running, WARM_UP, round)
            for workload in peer.workloads(self.quick):
                requests, result = self._measure(running, workload, round)
                self.record.measured.append(Measured(peer.key, workload.name, round, requests, **result))
                print(f"  {workload.name}: {result['output_throughput']:.1f} tokens/s", flush=True)
            self.record.started.append(Started(peer.key, round, running.started, running.memory()))

    def _running(self, peer: Peer, launch: Launch) -> AbstractContextManager[Running]:
        log = self.place.folder / f"{peer.key}.log"
        return serving(launch, self.place.name, log) if peer.served else driving(launch, log)

    def _measure(self, running: Running, workload: Workload, round: int) -> tuple[int, dict[str, float]]:
        """Return the number of requests, and their figures."""
        count, file = workload.scaled(self.scale), self.scratch / "requests.jsonl"
        # the same prompts for all, others in each round and workload: no cache knows them
        seed = round * 100 + WORKLOADS.index(workload) if workload in WORKLOADS else 99
        write(workload, count, seed, self.tokenizer, file)
        return count, self._figures(running, file, workload.concurrency)

    def _figures(self, running: Running, file: Path, concurrency: int) -> dict[str, float]:
        if running.url:
            result = self.client.measure(running.url, self.place.name, self.place.model, file, concurrency)
            return {
                "output_throughput": result["output_throughput"],
                "ttft": result["median_ttft_ms"],
                "itl": result["median_itl_ms"],
            }
        result = running.job(file=str(file), concurrency=concurrency)
        return {
            "output_throughput": result["output_tokens"] / result["seconds"],
            "ttft": 1000 * statistics.median(result["ttfts"]),
            "itl": 1000 * statistics.median(result["itls"]),
        }

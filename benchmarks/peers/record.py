"""The figures of a run, as saved in the JSON file from which tables and chart are made."""

import statistics
from pathlib import Path

import msgspec
from msgspec import Struct


class Entry(Struct):
    """A peer that took part."""

    title: str
    precision: str
    served: bool
    version: str
    note: str


class Measured(Struct):
    """The figures of one workload of one peer in one round."""

    peer: str
    workload: str
    round: int
    requests: int
    output_throughput: float  # tokens a second
    ttft: float  # ms, the median
    itl: float  # ms, the median


class Started(Struct):
    """The figures of one start of one peer."""

    peer: str
    round: int
    seconds: float  # from the command to the first answer
    memory: float  # MB after all workloads


class Record(Struct, kw_only=True):
    """The figures of one call of the command."""

    date: str
    command: str
    machine: str
    client: str = ""
    parameters: int  # of the model
    bytes: dict[str, int]  # of its weights, by precision
    ceilings: list[dict[str, dict[str, float]]] = []  # a round: by threads, by name
    peers: dict[str, Entry] = {}
    measured: list[Measured] = []
    started: list[Started] = []
    skipped: dict[str, str] = {}  # why, by the peer's key

    def values(self, peer: str, workload: str, figure: str = "output_throughput") -> list[float]:
        """Return a figure for each round."""
        return [getattr(one, figure) for one in self.measured if (one.peer, one.workload) == (peer, workload)]

    def median(self, peer: str, workload: str, figure: str = "output_throughput") -> float | None:
        values = self.values(peer, workload, figure)
        return statistics.median(values) if values else None

    def requests(self, peer: str, workload: str) -> int:
        """Return the number of requests in a round; 0 if it was not measured."""
        return next((one.requests for one in self.measured if (one.peer, one.workload) == (peer, workload)), 0)

    def best(self, peers: tuple[str, ...], workload: str) -> tuple[str, float] | None:
        """Return the fastest of these peers, and its output tokens per second."""
        rates = [(value, peer) for peer in peers if (value := self.median(peer, workload)) is not None]
        return (max(rates)[1], max(rates)[0]) if rates else None

    def ceiling(self, *names: str) -> float | None:
        """Return the greatest of these ceilings with all threads, the median of the rounds."""
        rounds = [max(one[max(one, key=int)][name] for name in names) for one in self.ceilings]
        return statistics.median(rounds) if rounds else None


def save(record: Record, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def load(path: Path) -> Record:
    return msgspec.json.decode(path.read_bytes(), type=Record)

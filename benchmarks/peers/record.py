"""The figures of one or several calls, as saved in the JSON file from which tables and chart are made."""

import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

Ceilings = dict[str, dict[str, float]]
"""What the machine does at most: by number of threads, by name."""


class Entry(Struct):
    """A peer that took part."""

    title: str
    precision: str
    served: bool
    version: str
    note: str


class Weights(Struct):
    """A model's weights that take part in products."""

    title: str
    layers: int  # how many in the layers: those that a token of a prompt is multiplied with
    head: int  # and how many more an output token is
    bytes: dict[str, int]  # of both together, by precision; scales count in a GGUF file alone


class Measured(Struct):
    """The figures of one workload of one peer in one round."""

    model: str
    peer: str
    workload: str
    round: int
    requests: int
    output_throughput: float  # tokens a second
    input_throughput: float  # tokens of prompts a second, of the same seconds
    ttft: float  # ms, the median
    itl: float  # ms, the median; 0 with one token a request
    itl_p99: float  # ms


class Started(Struct):
    """The figures of one start of one peer."""

    model: str
    peer: str
    round: int
    seconds: float  # from the command to the first answer
    memory: float  # MB after all workloads
    busy: float  # per cent of the CPUs that others used in the second before


class Record(Struct, kw_only=True):
    """The figures of all calls that were merged."""

    date: str
    machine: str
    commands: list[str] = []
    clients: list[str] = []
    ceilings: list[Ceilings] = []  # one a round of a call
    models: dict[str, Weights] = {}
    peers: dict[str, Entry] = {}
    measured: list[Measured] = []
    started: list[Started] = []
    skipped: dict[str, str] = {}  # why, by model and peer

    def measure(self, figures: Measured) -> None:
        """Add the figures of a workload, in place of older ones of the same round."""
        self.measured = [one for one in self.measured if _what(one) != _what(figures)] + [figures]

    def start(self, figures: Started) -> None:
        """Add the figures of a start, in place of older ones of the same round."""
        key = (figures.model, figures.peer, figures.round)
        self.started = [one for one in self.started if (one.model, one.peer, one.round) != key] + [figures]

    def values(self, model: str, peer: str, workload: str, figure: str = "output_throughput") -> list[float]:
        """Return a figure for each round."""
        return [getattr(one, figure) for one in self._of(model, peer, workload)]

    def median(self, model: str, peer: str, workload: str, figure: str = "output_throughput") -> float | None:
        values = self.values(model, peer, workload, figure)
        return statistics.median(values) if values else None

    def requests(self, model: str, peer: str, workload: str) -> int:
        """Return the number of requests in a round; 0 if it was not measured."""
        return next((one.requests for one in self._of(model, peer, workload)), 0)

    def ceiling(self, *names: str) -> float | None:
        """Return the greatest of these ceilings with all threads, the median of the rounds."""
        rounds = [max(one[max(one, key=int)][name] for name in names) for one in self.ceilings]
        return statistics.median(rounds) if rounds else None

    def _of(self, model: str, peer: str, workload: str) -> Iterable[Measured]:
        return (one for one in self.measured if (one.model, one.peer, one.workload) == (model, peer, workload))


def _what(one: Measured) -> tuple[str, str, str, int]:
    return one.model, one.peer, one.workload, one.round


def save(record: Record, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def load(path: Path) -> Record:
    """Return the record in a file. Exit if the file is of another version of this program."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.ValidationError as error:
        raise SystemExit(f"{path}: {error}; measure anew, without --merge and --report") from error

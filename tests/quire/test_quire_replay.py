"""Tests `quire replay`: what it prints about a record, its trace, and how it fails."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quire.cli import run
from services.scheduler.core import Limits
from services.scheduler.record import pack_entry, read_record
from services.scheduler.recorder import RecordedScheduler, Recorder
from shared.errors import ConfigError, ReplayFailure
from shared.protocol import Epoch, SampledRow, Sampling, StepResult, Submit, TokenLogprobs, pack_tokens

LIMITS = Limits(num_blocks=4, max_num_seqs=4, max_num_batched_tokens=20, max_model_len=64)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return a record: request 1 forks, 2 is preempted by 1, both lose a worker, 3 is refused, and 4 is aborted."""
    now = 100.0
    core = RecordedScheduler(LIMITS, Recorder(str(tmp_path), "east", "model", lambda: now))

    def submit(id: int, prompt_len: int, max_tokens: int, n: int = 1) -> None:
        prompt = pack_tokens([id] * prompt_len)
        sampling, name = Sampling(max_tokens=max_tokens, seed=0), f"cmpl-{'abcd'[id - 1]}"
        core.submit(Submit(id, prompt, prompt_len, sampling, n, arrival=float(id), request_id=name), now)

    def step() -> None:
        nonlocal now
        now += 0.5
        plan = core.plan(now)
        assert plan is not None
        slots = [row.slot for row in plan.rows if row.samples]
        slots += [slot for fork in plan.forks for slot, _ in fork.children]
        core.commit(StepResult(plan.epoch, plan.step, [SampledRow(slot, [7]) for slot in slots]))

    core.begin_epoch(Epoch("boot", 1), LIMITS.num_blocks)
    submit(1, 18, 30, n=2)
    submit(2, 8, 20)
    submit(3, 60, 5)
    for _ in range(20):
        step()
    core.lose_worker(now)
    core.begin_epoch(Epoch("boot", 2), LIMITS.num_blocks)
    submit(4, 5, 5)
    core.abort(4)
    core.drain()
    core.reset_prefix_cache()
    while core.unfinished:
        step()
    core.end_record()
    (path,) = tmp_path.iterdir()
    return path


def lines(capsys: pytest.CaptureFixture[str], *argv: object) -> list[str]:
    assert run(["replay", *map(str, argv)], 0.0) == 0
    return capsys.readouterr().out.splitlines()


def timeline(path: Path, capsys: pytest.CaptureFixture[str], request: int) -> list[str]:
    """Return the lines of a request's timeline, with single spaces."""
    title, *events = lines(capsys, path, "--request", request)[1:]
    assert title.startswith(f"request {request} (cmpl-{'abcd'[request - 1]}), ")
    return [" ".join(line.split()) for line in events]


def test_a_summary_has_the_preemptions_and_the_losses(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = lines(capsys, record)
    assert printed[0].startswith("engine east, model model, from 20")
    assert [" ".join(line.split()) for line in printed[1:]] == [
        "128 inputs in 29.500 s, and 59 plans, which are the recorded ones",
        "requests: 4 submitted, 1 refused, 0 unfinished at the end",
        "samples ended: 1 abort, 3 length",
        "tokens generated: 80",
        "preemptions: 2",
        "5.500000 1.1 preempted slot 2, after 9 tokens of output",
        "8.500000 2.0 preempted slot 1, after 15 tokens of output",
        "worker losses: 1",
        "10.000000 worker lost it died, hung or failed, with 1 samples",
        "the state at the end is the recorded one",
    ]


def test_the_timeline_of_a_request(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline(record, capsys, 1) == [
        "0.000000 submitted 18 tokens of prompt, n=2, max_tokens=30",
        "0.500000 .0 admitted slot 0, 0 positions are in its blocks already",
        "0.500000 .0 chunk positions 0 to 15",
        "1.000000 .0 chunk positions 16 to 17",
        "1.000000 .1 forked slot 2, from the sample that computed the prompt",
        "1.000000 .0 tokens 1 to 19, until 10.000000",
        "1.000000 .1 tokens 1 to 9, until 5.000000",
        "5.500000 .1 preempted slot 2, after 9 tokens of output",
        "10.000000 worker lost it died, hung or failed, with 1 samples",
        "10.000000 .0 lost slot 0, with the worker",
        "10.000000 epoch a worker with 4 blocks begins epoch 2",
        "10.000000 drain no new requests are accepted",
        "10.000000 cache reset all cached blocks are forgotten",
        "10.500000 .0 resumed slot 0, 0 positions are in its blocks already",
        "10.500000 .0 chunk positions 0 to 19",
        "11.000000 .0 chunk positions 20 to 36",
        "11.000000 .0 tokens 20 to 30, until 16.000000",
        "16.000000 .0 ended length",
        "19.500000 .1 resumed slot 0, 16 positions are in its blocks already",
        "19.500000 .1 chunk positions 16 to 26",
        "19.500000 .1 tokens 10 to 30, until 29.500000",
        "29.500000 .1 ended length",
    ]
    refused, reason = timeline(record, capsys, 3)
    assert refused == "0.000000 submitted 60 tokens of prompt, n=1, max_tokens=5"
    assert reason.startswith("0.000000 refused too_long: 60 tokens of prompt and 5 of output are more than")
    assert timeline(record, capsys, 4)[-1] == "10.000000 .0 ended abort"


@pytest.mark.parametrize("id", ["2", "b", "cmpl-b"])
def test_a_request_is_found_by_the_id_that_its_client_has_seen(
    id: str, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lines(capsys, record, f"--request={id}")[1].startswith("request 2 (cmpl-b), ")


def test_all_prompts_and_attempts_of_a_request_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = RecordedScheduler(LIMITS, Recorder(str(tmp_path), "east", "model", lambda: 100.0))
    for id, name in enumerate(["cmpl-a-0", "cmpl-a-1", "cmpl-b", "cmpl-a-1", "cmpl-a-x", "4", "chatcmpl-c", "resp_c"]):
        core.submit(Submit(id, pack_tokens([1]), 1, Sampling(max_tokens=1, seed=0), request_id=name), 100.0)
    core.end_record()
    (path,) = tmp_path.iterdir()
    titles = [line.partition(",")[0] for line in lines(capsys, path, "--request=a") if line.startswith("request")]
    assert titles == ["request 0 (cmpl-a-0)", "request 1 (cmpl-a-1)", "request 3 (cmpl-a-1)"]
    assert lines(capsys, path, "--request=4")[1].startswith("request 5 (4)"), "a client's id comes before a number"
    titles = [line.partition(",")[0] for line in lines(capsys, path, "--request=c") if line.startswith("request")]
    assert titles == ["request 6 (chatcmpl-c)", "request 7 (resp_c)"], "the id in X-Request-Id"


def test_a_request_from_before_the_record_has_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(str(tmp_path), "east", "model", lambda: 100.0)
    core = RecordedScheduler(LIMITS, recorder)
    core.submit(Submit(7, pack_tokens([1]), 1, Sampling(max_tokens=1, seed=0), request_id="cmpl-a"), 100.0)
    recorder.go_on(core)
    core.abort(7)
    core.end_record()
    path = max(tmp_path.iterdir())
    assert lines(capsys, path, "--request=a")[2:4] == [
        "request 7 (cmpl-a), in seconds since the record began; tokens are counted within the output",
        "it was submitted before",
    ]


def test_who_ran_when_a_worker_was_lost_is_shown_as_a_suspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = RecordedScheduler(LIMITS, Recorder(str(tmp_path), "east", "model", lambda: 100.0))
    core.submit(Submit(7, pack_tokens([1] * 9), 9, Sampling(max_tokens=5, seed=0), request_id="cmpl-a"), 100.0)
    core.begin_epoch(Epoch("boot", 1), LIMITS.num_blocks)
    core.plan(101.0)
    core.lose_worker(102.0)
    core.end_record()
    (path,) = tmp_path.iterdir()
    *_, line = lines(capsys, path, "--request=a")
    assert " ".join(line.split()) == "2.000000 .0 suspected until 9 positions are computed; deaths alone: 1"


def test_who_ran_when_a_worker_left_goes_on_with_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = RecordedScheduler(LIMITS, Recorder(str(tmp_path), "east", "model", lambda: 103.0))
    core.begin_epoch(Epoch("boot", 1), LIMITS.num_blocks)
    core.submit(Submit(7, pack_tokens([1] * 9), 9, Sampling(max_tokens=5, seed=0), request_id="cmpl-a"), 103.0)
    plan = core.plan(103.0)
    assert plan is not None
    core.commit(StepResult(plan.epoch, plan.step, [SampledRow(0, [7])]))
    core.end_epoch()
    core.begin_epoch(Epoch("boot", 2), LIMITS.num_blocks)
    core.plan(103.0)
    core.end_record()
    (path,) = tmp_path.iterdir()
    assert [" ".join(line.split()) for line in lines(capsys, path, "--request=a")][-6:-1] == [
        "0.000000 .0 tokens 1",
        "0.000000 worker left it was told to end, with 1 samples",
        "0.000000 .0 lost slot 0, with the worker",
        "0.000000 epoch a worker with 4 blocks begins epoch 2",
        "0.000000 .0 resumed slot 0, 0 positions are in its blocks already",
    ]


def test_who_has_its_first_chunk_computed_is_no_suspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The row that brings its prompt's log-probabilities has no tokens, and tells how long it waited."""
    core = RecordedScheduler(LIMITS, Recorder(str(tmp_path), "east", "model", lambda: 100.0))
    length = 2 * LIMITS.max_num_batched_tokens
    scored = Sampling(max_tokens=5, seed=0, prompt_logprobs=0)
    core.submit(Submit(7, pack_tokens([1] * length), length, scored, request_id="cmpl-a"), 100.0)
    core.begin_epoch(Epoch("boot", 1), LIMITS.num_blocks)
    plan = core.plan(101.0)
    assert plan is not None
    (chunk,) = plan.rows
    entries = [TokenLogprobs(-1.0, 1, [], [])] * chunk.count
    (row,) = core.commit(StepResult(plan.epoch, plan.step, [SampledRow(chunk.slot, [], None, entries)]))
    assert row.scheduling is not None
    core.end_record()
    (path,) = tmp_path.iterdir()
    life = lines(capsys, path, "--request=a")
    assert any("positions 0 to" in line for line in life)
    assert not any("suspected" in line for line in life)


def test_a_trace_shows_when_samples_waited_and_where_they_ran(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(capsys, record, "--trace", tmp_path / "trace.json")
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(one["name"], one["tid"], one["ts"] / 1e6, one["dur"] / 1e6) for one in events if one["ph"] == "X"]
    assert sorted(spans) == [
        ("1.0 decode", 0, 1.0, 9.0),
        ("1.0 decode", 0, 11.0, 5.0),
        ("1.0 prefill", 0, 0.5, 0.5),
        ("1.0 prefill", 0, 10.5, 0.5),
        ("1.1 decode", 0, 19.5, 10.0),
        ("1.1 decode", 2, 1.0, 4.5),
        ("1.1 prefill", 0, 19.5, 0.0),
        ("2.0 decode", 0, 17.0, 2.0),
        ("2.0 decode", 1, 1.0, 7.5),
        ("2.0 prefill", 0, 16.5, 0.5),
        ("2.0 prefill", 1, 0.5, 0.5),
    ]
    begins = [(one["id"], one["ts"] / 1e6) for one in events if one["ph"] == "b"]
    ends = [(one["id"], one["ts"] / 1e6) for one in events if one["ph"] == "e"]
    waits = sorted((id, begin, end) for (id, begin), (same, end) in zip(begins, ends, strict=True) if id == same)
    assert waits == [
        ("1.0", 0.0, 0.5),
        ("1.0", 10.0, 10.5),
        ("1.1", 0.0, 1.0),
        ("1.1", 5.5, 19.5),
        ("2.0", 0.0, 0.5),
        ("2.0", 8.5, 16.5),
        ("4.0", 10.0, 10.0),
    ]
    instants = [(one["name"], one["s"], one["ts"] / 1e6) for one in events if one["ph"] == "i"]
    assert ("1.1 preempted", "t", 5.5) in instants
    assert ("worker lost", "g", 10.0) in instants


def cut(path: Path, keep: int) -> None:
    """Cut a record in the entry of this index, as if the process had been killed while it wrote that."""
    record = read_record(path)
    whole = sum(len(pack_entry(entry)) for entry in record.entries[keep:])
    os.truncate(path, path.stat().st_size - whole + 3)


def test_a_record_that_was_cut_off_says_so(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut(record, 60)
    printed = lines(capsys, record)
    assert printed[1] == "the last 3 bytes are dropped: of an entry that was being written"
    assert printed[2].startswith("60 inputs in ")
    assert printed[-1] == "the state at the end is not recorded"


def test_requests_that_still_run_at_the_end_are_in_the_trace(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(record, 6)  # before the second step
    assert "requests: 3 submitted, 1 refused, 2 unfinished at the end" in lines(
        capsys, record, "--trace", tmp_path / "trace.json"
    )
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(one["name"], one["dur"] / 1e6) for one in events if one["ph"] == "X"] == [
        ("1.0 prefill", 0.0),
        ("2.0 prefill", 0.0),
    ]


def test_a_wrong_core_fails_after_the_plans_that_were_right(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never preempts for a request that stands before another."""
    monkeypatch.setattr("services.scheduler.core.queues.Queues.preempt", lambda *_: None)
    monkeypatch.setattr("services.scheduler.core.planner.Planner._extend", lambda *_: False)
    with pytest.raises(ReplayFailure, match=r"plan \d+ \(input \d+, \+\d+\.500000 s\) differs from the recorded one"):
        run(["replay", str(record)], 0.0)
    printed = capsys.readouterr().out
    assert "which are the recorded ones" in printed
    assert "the state at the end" not in printed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--request=77"], "--request 77: the record has no such request; it has 4 from 1 to 4"),
        (["--request=cmpl-"], "--request cmpl-: the record has no such request; it has 4 from 1 to 4"),
        (["--trace=/no/such/folder/x"], "--trace /no/such/folder/x: No such file or directory"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], said: str, record: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(["replay", str(record), *flags], 0.0)
    assert str(caught.value).startswith(said)

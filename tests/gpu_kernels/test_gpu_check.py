"""`python -m benchmarks.gpu_check` on a CPU: each part with a tiny model, and what becomes of a part that fails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import kernel_speed, kernel_tests
from benchmarks.gpu_check.activities import Activity, idle_between_steps
from benchmarks.gpu_check.ceilings import Ceilings
from benchmarks.gpu_check.engine_speed import decode_floor, prefill_floor
from benchmarks.gpu_check.equality import bits_equal, count_equal_tokens
from benchmarks.gpu_check.offline import Output
from benchmarks.gpu_check.parts import PARTS, Part, run_part
from benchmarks.gpu_check.report import (
    FAILED,
    MISSED,
    NONE,
    WRONG,
    YES,
    Message,
    Note,
    Report,
    Row,
    compare_times,
    count_equal,
)
from benchmarks.gpu_check.settings import CPU, GPU, Prompts
from benchmarks.gpu_check.stopwatch import Stopwatch
from shared.protocol import TokenLogprobs
from tests.waiting import wait_until

CHECKS = {
    "machine": ["device", "copy, ", "float32 product", "a launch, eager", "a launch, in a graph"],
    "tests": ["kernel tests, interpreted"],
    "kernels": ["decode attention", "chunk attention", "choosing", "rms_norm", "batch-invariant product", "int4"],
    "engine": ["start: random", "start: warming", "start: memory", "decode, batch 2", "prefill, 2 × 4", "idle", "KV"],
    "equality": ["graphs beside eager", "--batch-invariant: bits", "--batch-invariant, decode", "the GPU's choice",
                 "two ranks beside one"],
}  # fmt: skip


@pytest.mark.parametrize("part", [part.name for part in PARTS])
def test_a_part_on_a_cpu(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    before = gpu_check.PAGE.read_bytes() if gpu_check.PAGE.exists() else b""
    assert gpu_check.main(["--device", "cpu", "--only", part, "--out", str(page)]) == 0
    printed = [text for text in capsys.readouterr().out.splitlines() if text.startswith("| ")][2:]
    rows = [Row(*(cell.strip() for cell in text[1:-1].split("|"))) for text in printed]
    for name in CHECKS[part]:
        assert any(row.check.startswith(name) for row in rows), name
    for row in rows:
        assert row.ok in (NONE, YES)
        assert row.target in (NONE, "all", "none fails")  # targets are a GPU's
        assert row.reference == NONE or "beside" in row.check or row.check == "KV pool"  # and so are floors
    assert all(text in page.read_text() for text in printed)
    assert (gpu_check.PAGE.read_bytes() if gpu_check.PAGE.exists() else b"") == before


@pytest.mark.parametrize(("ok", "status"), [(YES, 0), (NONE, 0), (MISSED, 0), (WRONG, 1), (FAILED, 1)])
def test_the_exit_status_is_about_results(ok: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run", lambda *_: [Row("first", "1", ok=YES), Row("second", "2", ok=ok)])
    assert gpu_check.main(["--device", "cpu"]) == status


@pytest.mark.parametrize(
    ("argv", "page"),
    [
        ([], gpu_check.PAGE),
        (["--quick"], None),
        (["--only", "machine"], None),
        (["--device", "cpu"], None),
        (["--device", "cpu", "--out", "x.md"], Path("x.md")),
    ],
    ids=str,
)
def test_only_a_whole_run_on_a_gpu_writes_the_page(
    argv: list[str], page: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[Path | None] = []
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which `main` changes
    monkeypatch.setattr(gpu_check, "_has_gpu", lambda: True)
    monkeypatch.setattr(gpu_check, "run", lambda *arguments: pages.append(arguments[-1]) or [])
    assert gpu_check.main(argv) == 0
    assert pages == [page]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main([])
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("way", "last"),
    [
        ("crash", "ended with status 3"),
        ("hang", "not done after 2 s"),
        ("raise", "KeyError: 'outside'"),
    ],
)
def test_a_part_that_fails_is_a_row(way: str, last: str) -> None:
    part = Part("broken", "tests.gpu_kernels.broken_parts", 2)
    *messages, end = run_part(part, replace(CPU, dtype=way, limit_factor=1))
    assert end == Row("part broken", last, ok=FAILED)
    assert messages[0] == Row("before", "1")
    if way == "raise":
        assert messages[1:] == [Row("within", "ValueError: no such thing", ok=FAILED), Row("after", "2")]
    for note in messages:
        if isinstance(note, Note):
            wait_until(lambda pid=int(note.text): not is_running(pid))  # the process's own children end with it


def test_a_part_gets_no_more_than_is_left_of_all_time() -> None:
    settings = replace(CPU, dtype="hang", limit_factor=1)
    *_, end = run_part(Part("broken", "tests.gpu_kernels.broken_parts", 30), settings, seconds_left=0.5)
    assert end.ok == FAILED


def is_running(pid: int) -> bool:
    """Return whether there is such a process, and it is more than an entry that nobody has read yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_module_that_cannot_be_imported_is_a_row() -> None:
    (row,) = run_part(Part("lost", "tests.gpu_kernels.no_such_part", 2), CPU)
    assert row == Row("part lost", "ModuleNotFoundError: No module named 'tests.gpu_kernels.no_such_part'", ok=FAILED)


# wrong results are seen


def test_a_kernel_that_computes_something_else_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[Message] = []
    device = torch.device("cpu")
    bench = kernel_speed.Bench(CPU, Report(messages.append), Stopwatch(device, 1), None, device, torch.float32)
    norm = kernel_speed.gpu().rms_norm
    monkeypatch.setattr(kernel_speed.gpu(), "rms_norm", lambda *args: norm(*args) * 1.001)
    kernel_speed._measure_elementwise(bench, 3)
    verdicts = {row.check: row.ok for row in messages if isinstance(row, Row) and "beside" not in row.check}
    assert verdicts == {"rms_norm, 3 rows": WRONG, "add_rms_norm, 3 rows": YES, "silu_and_mul, 3 rows": YES}


def test_nan_is_wrong() -> None:
    x = torch.ones(3)
    assert kernel_speed._near(x, x)
    assert not kernel_speed._near(x * float("nan"), x)


@pytest.mark.parametrize("xdist", [False, True])
def test_tests_that_fail_are_counted(xdist: bool) -> None:
    lines = [
        "tests/gpu_kernels/test_x.py::test_a[1-%] PASSED                  [ 20%]",
        "tests/gpu_kernels/test_x.py::test_b[a, b] FAILED                  [ 40%]",
        "tests/gpu_kernels/test_x.py::test_c SKIPPED (no device)         [ 60%]",
        "tests/gpu_kernels/test_x.py::test_d ERROR                  [100%]",
    ]
    if xdist:
        lines = [
            "[gw0] [ 20%] PASSED tests/gpu_kernels/test_x.py::test_a[1-%] ",
            "[gw3] [ 40%] FAILED tests/gpu_kernels/test_x.py::test_b[a, b] ",
            "[gw0] [ 60%] SKIPPED tests/gpu_kernels/test_x.py::test_c ",
            "[gw0] [100%] ERROR tests/gpu_kernels/test_x.py::test_d ",
        ]
    summary = [
        "FAILED tests/gpu_kernels/test_x.py::test_b[a, b] - AssertionError: 1 != 2",
        "ERROR tests/gpu_kernels/test_x.py::test_d",
    ]
    rows: list[Any] = []
    report = Report(rows.append)
    kernel_tests.report_results([*lines, *summary, "exit status 1"], CPU, report)
    assert rows[0] == Row("kernel tests, interpreted", "1 passed, 2 failed, 1 skipped", target="none fails", ok=WRONG)
    folder = "test: tests/gpu_kernels/test_x.py::"
    assert rows[1:] == [
        Row(f"{folder}test_b[a, b]", "AssertionError: 1 != 2", ok=WRONG),
        Row(f"{folder}test_d", "no reason given", ok=WRONG),
    ]
    rows.clear()
    kernel_tests.report_results(lines[:1], CPU, report)  # it was cut
    assert rows == [Row("kernel tests, interpreted", "1 passed, 0 failed, 0 skipped, and then out of time",
                        target="none fails", ok=FAILED)]  # fmt: skip
    rows.clear()
    kernel_tests.report_results(["exit status 1"], CPU, report)
    assert rows[0].ok == FAILED  # nothing has run


def entry(margin: float) -> TokenLogprobs:
    return TokenLogprobs(-1.0, 1, [5, 6], [-1.0, -1.0 - margin])


def test_tokens_may_differ_only_where_two_are_equally_likely() -> None:
    sure, tie = entry(1.0), entry(0.01)
    ours = [Output([1, 2, 3], [sure, tie, sure])]
    assert count_equal_tokens(ours, [Output([1, 2, 3], [sure] * 3)]) == (3, 3)
    assert count_equal_tokens(ours, [Output([1, 9, 8], [sure] * 3)]) == (1, 1)
    assert count_equal_tokens(ours, [Output([9, 2, 3], [sure] * 3)]) == (0, 1)
    assert count_equal_tokens(ours, [Output([1, 2, 8], [sure] * 3)]) == (2, 3)


def test_bits_are_tokens_and_log_probabilities() -> None:
    ours, last_bit = Output([1], [entry(1.0)]), TokenLogprobs(-1.0 - 2**-23, 1, [5, 6], [-1.0, -2.0])
    assert bits_equal(ours, Output([1], [entry(1.0)]))
    assert not bits_equal(ours, Output([2], [entry(1.0)]))
    assert not bits_equal(ours, Output([1], [last_bit]))


@pytest.mark.parametrize(("equal", "total", "ok"), [(4, 4, YES), (3, 4, WRONG), (0, 0, WRONG)])
def test_all_must_be_equal(equal: int, total: int, ok: str) -> None:
    assert count_equal("x", equal, total, "tokens") == Row("x", f"{equal} of {total} tokens equal", target="all", ok=ok)


# figures


def test_idle_time_is_that_around_a_steps_copy() -> None:
    on_device = [
        Activity("Memcpy HtoD (Pinned -> Device)", 0, 1),
        Activity("kernel", 2, 5),
        Activity("kernel", 6, 9),  # a pause within the step
        Activity("Memcpy DtoH", 8, 8.5),  # beside a longer kernel
        Activity("Memcpy HtoD (Pinned -> Device)", 12, 13),
        Activity("kernel", 13.5, 20),
        Activity("Memcpy HtoD (Pinned -> Device)", 20, 21),
        Activity("kernel", 21, 22),
    ]
    assert idle_between_steps(on_device) == [3.5, 0.0]
    assert idle_between_steps([]) == []


def test_floors_are_those_of_an_h200() -> None:
    """The figures of the targets: tokens a second of decodes at a context of 1,024, and the seconds of a prefill."""
    h200 = Ceilings(4.3e12, 780e12)
    rates = [batch / decode_floor(h200, GPU.config, batch, 1024, 2) for batch in (1, 32, 256)]
    assert rates == pytest.approx([284, 7100, 19800], rel=0.01)
    assert prefill_floor(h200, GPU.config, Prompts(8, 1024)) == pytest.approx(0.149, rel=0.01)


def test_a_target_is_a_share_of_the_floor() -> None:
    assert compare_times("x", 400e-6, 250e-6, at_least=0.6) == Row("x", "400 µs", "250 µs", "62%", "≥ 60%", YES)
    assert compare_times("x", 400e-6, 250e-6, at_least=0.7, correct=True).ok == MISSED
    assert compare_times("x", 400e-6, 250e-6, at_least=0.6, correct=False).ok == WRONG
    assert compare_times("x", 0.4, None, at_least=0.6) == Row("x", "400 ms")

"""Part 2: the tests of the GPU's kernels, which run compiled on a GPU and interpreted on a CPU."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.gpu_check.report import FAILED, WRONG, YES, Report, Row
from benchmarks.gpu_check.settings import Settings

ROOT = Path(__file__).parents[2]
LIMIT = 105  # seconds, somewhat less than the part has
MAX_NAMED = 20

_OUTCOMES = "(?P<outcome>PASSED|FAILED|SKIPPED|ERROR)"
_RESULT = re.compile(rf"(?P<test>tests/.*) {_OUTCOMES}\b.*%\]$")
_RESULT_OF_PROCESS = re.compile(rf"\[gw\d+\] \[ *\d+%\] {_OUTCOMES} (?P<test>tests/.*)")


def run(settings: Settings, report: Report) -> None:
    with report.check("kernel tests"):
        began, objects_before = time.monotonic(), _count_objects()
        report_results(_pytest_lines(settings), settings, report)
        if settings.is_gpu:
            number = _count_objects() - objects_before
            report.add(Row("objects compiled by the tests", f"{number} in {time.monotonic() - began:.0f} s"))


def report_results(lines: Iterable[str], settings: Settings, report: Report) -> None:
    """Add a row for all tests, and one for each that has failed, from what `_pytest_lines` yields."""
    counts: Counter[str] = Counter()
    failed: dict[str, str] = {}  # reasons, which pytest tells at its end
    finished = False
    for text in lines:
        if result := _RESULT.match(text) or _RESULT_OF_PROCESS.match(text):
            counts[result["outcome"]] += 1
            if result["outcome"] in ("FAILED", "ERROR"):
                failed[result["test"].strip()] = "no reason given"
        for test in failed:
            _, named, reason = text.partition(f" {test} - ")
            failed[test] = reason if named else failed[test]
        finished = finished or text.startswith("exit status")
    report.add(_summary(counts, settings, finished=finished))
    for test, reason_text in list(failed.items())[:MAX_NAMED]:
        report.add(Row(f"test: {test}", reason_text, ok=WRONG))


def _summary(counts: Counter[str], settings: Settings, *, finished: bool) -> Row:
    failed = counts["FAILED"] + counts["ERROR"]
    text = f"{counts['PASSED']} passed, {failed} failed, {counts['SKIPPED']} skipped"
    ok = YES if counts["PASSED"] else FAILED  # on a GPU none may be left out
    if not finished:
        text, ok = f"{text}, and then out of time", FAILED
    return Row(f"kernel tests, {'compiled' if settings.is_gpu else 'interpreted'}", text, target="none fails",
               ok=WRONG if failed else ok)  # fmt: skip


def _pytest_lines(settings: Settings) -> Iterator[str]:
    """Yield what pytest prints as it runs, and then its exit status. End it at the limit."""
    files = [f"tests/gpu_kernels/{name}" for name in settings.test_files]
    options = ["-v", "--tb=no", "-rfE", "-p", "no:cacheprovider", f"--numprocesses={settings.test_processes}"]
    command = [sys.executable, "-m", "pytest", *options, *(["-m", "gpu"] if settings.is_gpu else []), *files]
    environment = os.environ | {
        "TRITON_INTERPRET": "0" if settings.is_gpu else "1",
        "COLUMNS": "300",
        "PYTHONUNBUFFERED": "1",
    }
    # The signal lets pytest end its own processes, and print why tests have failed up to then.
    with subprocess.Popen(
        ["timeout", "--foreground", "--signal=INT", "--kill-after=10", str(LIMIT), *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        text = ""
        for text in process.stdout:
            yield text.rstrip()
    if process.returncode in (0, 1):
        yield f"exit status {process.returncode}"
    elif process.returncode not in (2, 124, 137):
        raise RuntimeError(f"pytest ended with status {process.returncode}: {text.rstrip()}")


def _count_objects() -> int:
    """Return how many compiled objects Triton's cache has."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return sum(1 for _ in cache.glob("*/*.cubin"))

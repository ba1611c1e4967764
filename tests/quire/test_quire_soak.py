"""Runs a short soak of `quire serve`: overload, impatient clients, and a process of each kind killed or frozen."""

from pathlib import Path

import pytest

from benchmarks.soak.__main__ import main


def test_nothing_is_lost_or_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    flags = ["--minutes=0.3", "--every=5", "--seed=7", "--requests=4", "--max-num-seqs=2", f"--out={page}"]
    status = main(flags)
    assert status == 0, capsys.readouterr().err
    text = page.read_text()
    assert "| **streams lost** | **0** |" in text
    assert "| faults | 3 |" in text

"""Tests that no code tells prefill from decode: a row is a slot, a start and a count everywhere."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["kernels", "services", "shared", "quire"])
def test_there_are_no_phases(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    assert [file for file in files if "is_prefill" in file.read_text() or "is_decode" in file.read_text()] == []

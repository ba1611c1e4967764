"""Tests sampling defaults from generation_config.json, which may hold anything."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from shared.params import SamplingParams
from shared.text.sampling_defaults import SamplingDefaults


def load(folder: Path, content: str) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(content)
    return SamplingDefaults.load(folder).as_dict()


def test_generation_config_gives_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "top_p": None, "max_length": 4096}
    assert load(tmp_path, json.dumps(content)) == {"temperature": 0.6, "top_k": 20, "max_tokens": 7}
    assert not caplog.records


def test_no_generation_config_gives_no_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert SamplingDefaults.load(tmp_path).as_dict() == {}
    assert not caplog.records


@pytest.mark.parametrize(
    ("field", "written", "value"),
    [
        ("temperature", '"0.5"', 0.5),
        ("temperature", "1", 1.0),
        ("temperature", "0", 0.0),
        ("top_p", '" 0.9 "', 0.9),
        ("top_k", "50.0", 50),
        ("top_k", '"50"', 50),
        ("top_k", "-1", -1),
        ("top_k", "0", 0),
        ("min_p", '"1e-1"', 0.1),
        ("repetition_penalty", "1", 1.0),
        ("max_new_tokens", "1e3", 1000),
    ],
)
def test_what_can_be_read_is_read(
    field: str, written: str, value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LDG-28."""
    defaults = load(tmp_path, f'{{"{field}": {written}}}')
    assert defaults == {field.replace("max_new_tokens", "max_tokens"): value}
    assert [type(default) for default in defaults.values()] == [type(value)]
    assert not caplog.records


@pytest.mark.parametrize(
    ("field", "written"),
    [
        ("temperature", ["5", "-1", "NaN", "Infinity", "-Infinity", "1e999", "true", "[0.5]", '"warm"', '""', '"nan"']),
        ("top_p", ["0", "-0.1", "1.5", "NaN", '"0"', "false"]),
        ("top_k", ["-2", "50.5", "NaN", "true", "[50]", '"50.5"', "1e999"]),
        ("min_p", ["-0.1", "2", "NaN"]),
        ("repetition_penalty", ["0", "-1", "NaN", "Infinity"]),
        ("max_new_tokens", ["0", "-1", "0.5", "NaN", '"many"', "true"]),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_ignored_in_one_line(
    field: str, written: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LDG-28."""
    for value in written:
        caplog.clear()
        other = "min_p" if field != "min_p" else "top_p"
        defaults = load(tmp_path, f'{{"{field}": {value}, "{other}": 0.25}}')
        assert defaults == {other: 0.25}, value
        assert SamplingParams(**defaults)
        (record,) = caplog.records
        assert (record.levelno, "\n" in record.getMessage()) == (logging.WARNING, False)
        assert (
            f"generation_config.json: these values are ignored, since they are out of range or not numbers: {field} "
            in caplog.text
        )


def test_all_that_is_ignored_stands_in_one_short_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-28."""
    long = "x" * 100_000
    content = f'{{"temperature": 5, "top_p": 0, "top_k": "{long}", "min_p": NaN, "repetition_penalty": 1.1}}'
    assert load(tmp_path, content) == {"repetition_penalty": 1.1}
    (record,) = caplog.records
    assert all(field in record.getMessage() for field in ("temperature 5", "top_p 0", "top_k", "min_p nan"))
    assert len(record.getMessage()) < 500


@pytest.mark.parametrize("value", [10**30, 10**400])
def test_huge_numbers_end_nothing(value: int, tmp_path: Path) -> None:
    """LDG-28."""
    for field in ("temperature", "top_k", "max_new_tokens"):
        SamplingParams(**load(tmp_path, json.dumps({field: value})))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"x"', "[" * 100_000, '{"temperature": 0.5} x'])
def test_a_file_that_is_no_object_gives_no_defaults(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LDG-28."""
    assert load(tmp_path, content) == {}
    (record,) = caplog.records
    assert str(tmp_path / "generation_config.json") in record.getMessage()


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    """LDG-28."""
    assert load(tmp_path, '\ufeff{"temperature": 0.5}') == {"temperature": 0.5}

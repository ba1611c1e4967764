"""Tests `quire bench throughput` and `quire bench latency` with a tiny model in this process."""

import json
import math
from pathlib import Path

import pytest

from quire.bench.command import bench
from shared.errors import ConfigError, InvalidRequest


def small(folder: Path, *flags: str) -> list[str]:
    return [f"--model={folder}", "--device=cpu", "--num-gpu-blocks-override=200", "--num-threads=1", *flags]


def test_throughput_counts_what_was_read_and_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    flags = ["--num-prompts=6", "--input-len=10", "--output-len=5", "--n=2", "--num-warmups=2", f"--output-json={path}"]
    assert bench(["throughput", *small(folder, *flags, "--disable-tqdm", "--max-num-seqs=4")]) == 0
    result = json.loads(path.read_text())
    assert list(result) == [
        "model_id",
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
    ]
    assert (result["model_id"], result["num_requests"], result["total_num_tokens"]) == (
        str(folder),
        6,
        6 * (10 + 2 * 5),
    )
    assert result["tokens_per_second"] == pytest.approx(120 / result["elapsed_time"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"Throughput: {result['requests_per_second']:.2f} requests/s, ")
    assert printed.endswith("Total num prompt tokens:  60\nTotal num output tokens:  60\n")


def test_throughput_of_text_with_a_shared_prefix(folder: Path, tmp_path: Path) -> None:
    path, prompts = tmp_path / "out.json", tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "The quick brown fox", "output_tokens": 4}\n')
    flags = ["--dataset-name=custom", f"--dataset-path={prompts}", "--custom-output-len=-1", "--num-prompts=3"]
    assert bench(["throughput", *small(folder, *flags, f"--output-json={path}", "--disable-tqdm")]) == 0
    result = json.loads(path.read_text())
    assert result["num_requests"] == 3
    assert result["total_num_tokens"] > 3 * 4


def test_latency_runs_the_batch_so_often(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    flags = ["--batch-size=2", "--input-len=8", "--output-len=4", "--num-iters=3", "--num-iters-warmup=1"]
    assert bench(["latency", *small(folder, *flags, f"--output-json={path}")]) == 0
    result = json.loads(path.read_text())
    assert list(result) == ["model_id", "avg_latency", "latencies", "percentiles"]
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(math.fsum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == sorted(result["latencies"])[1]
    assert f"50% percentile latency: {result['percentiles']['50']} seconds\n" in capsys.readouterr().out


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="127"):
        bench(["latency", *small(folder, "--input-len=127", "--output-len=9", "--num-iters=1")])
    with pytest.raises(ConfigError, match="--block-size '7'"):
        bench(["latency", *small(folder, "--block-size=7")])
    with pytest.raises(ConfigError, match="unrecognized arguments: --gateways"):
        bench(["throughput", *small(folder, "--gateways=tcp://x")])

"""Compares `quire bench serve` with `vllm bench serve` on the same server.

Both clients get the same flags and take turns for a few rounds. It prints the medians over the rounds, their spread
(greatest over least), and the ratio of the two. Prompts are drawn anew in each round, so that none is in the prefix
cache. vLLM's client needs the package vllm in an environment of its own; name its executable.

    python benchmarks/compare_clients.py --vllm /elsewhere/bin/vllm --step 0.02      # a worker with steps of 20 ms
    python benchmarks/compare_clients.py --vllm /elsewhere/bin/vllm                  # the embedded model
    python benchmarks/compare_clients.py --vllm ... --url http://host:8000 --model NAME --tokenizer FOLDER

With `--step` the gateway and the scheduler are real, and the worker sleeps so long in each step instead of computing:
what the machine does meanwhile then matters little, and a difference is the clients'.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving import ROOT, embedded, sleeping
from shared.hub.checkpoint import locate
from shared.hub.embedded import EMBEDDED

FIGURES = (
    "duration",
    "output_throughput",
    "total_token_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
)


@asynccontextmanager
async def elsewhere(url: str) -> AsyncIterator[str]:
    yield url


async def measure(argv: list[str], url: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one client; return the content of its result file."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            *("bench", "serve", "--backend", "openai", "--base-url", url),
            *("--model", args.model, "--tokenizer", args.tokenizer or str(locate(""))),
            *("--dataset-name", "random", "--temperature", "0", "--seed", str(seed)),
            *("--random-input-len", str(args.input), "--random-output-len", str(args.output)),
            *("--num-prompts", str(args.num_prompts), "--request-rate", str(args.request_rate)),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        if args.concurrency:
            flags += ["--max-concurrency", str(args.concurrency)]
        process = await asyncio.create_subprocess_exec(
            *argv, *flags, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        if process.returncode:
            raise SystemExit(f"{argv[0]} failed:\n{said.decode()}")
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    if result["failed"] or result["completed"] != args.num_prompts:
        raise SystemExit(f"{argv[0]}: {result['completed']} requests were answered, {result['failed']} failed")
    return result


def table(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    lines = ["| | quire bench | spread | vllm bench | spread | quire / vllm |", "|---|---|---|---|---|---|"]
    for name in FIGURES:
        a, b = ([float(result[name]) for result in results] for results in (ours, theirs))
        cells = [f"{statistics.median(values):.2f} | {max(values) / min(values):.3f}" for values in (a, b)]
        lines.append(f"| {name} | {' | '.join(cells)} | {statistics.median(a) / statistics.median(b):.4f} |")
    return "\n".join(lines)


async def run(args: argparse.Namespace) -> None:
    place = elsewhere(args.url) if args.url else sleeping(args.step) if args.step else embedded()
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    async with place as url:
        for round in range(args.rounds):
            ours.append(await measure([sys.executable, "-m", "quire"], url, 2 * round, args))
            theirs.append(await measure([args.vllm], url, 2 * round + 1, args))
    print(table(ours, theirs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the executable")
    parser.add_argument("--step", type=float, help="seconds a step, of a worker without a model")
    parser.add_argument("--url", help="a running server")
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--tokenizer", help="folder; the embedded model's if unset")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--request-rate", type=float, default=float("inf"))
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

"""The client of all servers: `vllm bench serve`, or `quire bench serve` where that is not installed; same flags."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.environments import ROOT, SHOWN, Skipped
from benchmarks.peers.launch import Launch
from benchmarks.peers.processes import driving

MISCOUNTED = 0.03
"""The share of tokens that may be missing: some servers report no counts, and tokenizing their text gives a few less.
The rate is that of the counted tokens."""


class Client(NamedTuple):
    """A client: its name, and the function that runs it."""

    name: str
    call: Callable[[list[str]], None]  # with the flags behind `bench serve`; raises `Skipped`

    def measure(self, url: str, model: str, tokenizer: Path, file: Path, concurrency: int) -> dict[str, Any]:
        """Return the figures for the requests of `file`. Raise `Skipped` unless all are answered in full."""
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        with tempfile.TemporaryDirectory() as folder:
            self.call(
                [
                    *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
                    *("--model", model, "--tokenizer", str(tokenizer), "--num-prompts", str(len(lines))),
                    *("--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "-1"),
                    *("--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--temperature", "0"),
                    *("--max-concurrency", str(concurrency), "--ready-check-timeout-sec", "0", "--disable-tqdm"),
                    *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
                ]
            )
            result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        expected = sum(line["output_tokens"] for line in lines)
        if result["failed"] or abs(result["total_output_tokens"] - expected) > MISCOUNTED * expected:
            came = result["total_output_tokens"]
            raise Skipped(f"{expected} tokens were asked for, and {came} came, with {result['failed']} failed requests")
        return result


def ours() -> Client:
    """Return the client `quire bench serve`."""
    return Client("quire bench serve", _call_ours)


def _call_ours(flags: list[str]) -> None:
    argv = [sys.executable, "-m", "quire", "bench", "serve", *flags]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise Skipped(f"quire bench serve: {done.stdout.strip()[-SHOWN:]}")


@contextmanager
def vllm_client(programs: Path, log: Path) -> Iterator[Client]:
    """Yield the client `vllm bench serve` of the environment with these programs. Raise `Skipped` if it fails."""
    program = Path(__file__).parent / "inside" / "drive_vllm_client.py"
    with driving(Launch([str(programs / "python"), str(program)]), log) as running:

        def call(flags: list[str]) -> None:
            if error := running.job(flags=flags)["error"]:
                raise Skipped(f"vllm bench serve: {error} (see {log})")

        yield Client("vllm bench serve", call)

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
"""Of the tokens, at most: some servers don't say how many they gave, and a client that tokenizes their text again finds
a few less. The rate is of those that were counted."""


class Client(NamedTuple):
    """One of the two."""

    name: str
    call: Callable[[list[str]], None]  # with the flags behind `bench serve`; raises `Skipped`

    def measure(self, url: str, model: str, tokenizer: Path, file: Path, concurrency: int) -> dict[str, Any]:
        """The figures for the requests of `file`. Raises `Skipped` unless all are answered in full."""
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
            found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        wanted = sum(line["output_tokens"] for line in lines)
        if found["failed"] or abs(found["total_output_tokens"] - wanted) > MISCOUNTED * wanted:
            came = found["total_output_tokens"]
            raise Skipped(f"{wanted} tokens were asked for, and {came} came, with {found['failed']} failed requests")
        return found


def ours() -> Client:
    """`quire bench serve`."""
    return Client("quire bench serve", _call_ours)


def _call_ours(flags: list[str]) -> None:
    argv = [sys.executable, "-m", "quire", "bench", "serve", *flags]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise Skipped(f"quire bench serve: {done.stdout.strip()[-SHOWN:]}")


@contextmanager
def vllms(programs: Path, log: Path) -> Iterator[Client]:
    """`vllm bench serve`, out of the environment with these programs. Raises `Skipped` if it does not start."""
    program = Path(__file__).parent / "inside" / "drive_vllm_client.py"
    with driving(Launch([str(programs / "python"), str(program)]), log) as running:

        def call(flags: list[str]) -> None:
            if error := running.job(flags=flags)["error"]:
                raise Skipped(f"vllm bench serve: {error} (see {log})")

        yield Client("vllm bench serve", call)

"""The client of all servers: `vllm bench serve`, or `quire bench serve` where that is not installed; same flags."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.environments import ROOT, SHOWN, Skipped


class Client(NamedTuple):
    """One of the two."""

    name: str
    argv: tuple[str, ...]

    def measure(self, url: str, model: str, tokenizer: Path, file: Path, concurrency: int) -> dict[str, Any]:
        """The figures for the requests of `file`. Raises `Skipped` unless all are answered in full."""
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        with tempfile.TemporaryDirectory() as folder:
            flags = [
                *("bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
                *("--model", model, "--tokenizer", str(tokenizer), "--num-prompts", str(len(lines))),
                *("--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "-1"),
                *("--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--temperature", "0"),
                *("--max-concurrency", str(concurrency), "--ready-check-timeout-sec", "0", "--disable-tqdm"),
                *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
            ]
            done = subprocess.run(
                [*self.argv, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            if done.returncode:
                raise Skipped(f"{self.name}: {done.stdout.strip()[-SHOWN:]}")
            found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        wanted = sum(line["output_tokens"] for line in lines)
        if (came := found["total_output_tokens"]) != wanted:
            raise Skipped(f"{wanted} tokens were asked for, {came} came: {done.stdout.strip()[-SHOWN:]}")
        return found


OURS = Client("quire bench serve", (sys.executable, "-m", "quire"))

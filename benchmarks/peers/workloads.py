"""The workloads of every peer: prompts of random tokens, as text with exactly as many tokens.

A prompt is written both as text and as tokens. Servers get the text; what runs in process gets the tokens.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from quire.bench.options import ServeOptions
from quire.bench.workload import RequestGenerator
from shared.text.tokenizer import Tokenizer


class Workload(NamedTuple):
    """A shape of load, in a closed loop."""

    name: str
    title: str
    concurrency: int
    requests: int  # at scale 1
    shape: dict[str, Any]  # options of `quire bench`

    def scaled(self, scale: float) -> int:
        """Return the number of requests at this scale."""
        return max(1, round(self.requests * scale))


SHORT = {"dataset_name": "random", "random_input_len": 128, "random_output_len": 128}
TAIL = {"dataset_name": "long-tail", "long_tail_input_len": 128}
PREFIX = {"dataset_name": "random", "random_prefix_len": 512, "random_input_len": 32, "random_output_len": 32}

WARM_UP = Workload("warm-up", "", 8, 8, SHORT | {"random_output_len": 8})

STEADY = tuple(
    Workload(f"steady-{concurrency}", f"128 in, 128 out, {concurrency} at a time", concurrency, requests, SHORT)
    for concurrency, requests in ((1, 4), (8, 16), (32, 64), (64, 128))
)
LONG_TAIL = Workload("long-tail", "128 in, 8 to 474 out (mean 104), 32 at a time", 32, 128, TAIL)
SHARED_PREFIX = Workload("shared-prefix", "512 shared + 32 in, 32 out, 16 at a time", 16, 64, PREFIX)

WORKLOADS = (*STEADY, LONG_TAIL, SHARED_PREFIX)


def write(workload: Workload, count: int, seed: int, tokenizer: Tokenizer, path: Path) -> None:
    """Draw `count` requests and write them to `path`, a line of JSON each, as `bench serve` reads its own files."""
    options = ServeOptions(num_prompts=count, **workload.shape)
    with path.open("w", encoding="utf-8") as file:
        for request in RequestGenerator(options, tokenizer, seed=seed, text=True).generate():
            tokens = tokenizer.encode(str(request.prompt))
            line = {"prompt": request.prompt, "tokens": tokens, "output_tokens": request.output_len}
            file.write(json.dumps(line) + "\n")

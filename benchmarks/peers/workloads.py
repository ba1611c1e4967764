"""The workloads of each model: prompts of random tokens, as text with exactly as many tokens.

A prompt is written both as text and as tokens. Servers get the text; what runs in process gets the tokens.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.models import LARGE, MIDDLE, SMALL
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


def _random(name: str, inputs: int, outputs: int, concurrency: int, requests: int) -> Workload:
    shape = {"dataset_name": "random", "random_input_len": inputs, "random_output_len": outputs}
    return Workload(name, f"{inputs} in, {outputs} out, {concurrency} at a time", concurrency, requests, shape)


def _steady(outputs: int, *loads: tuple[int, int]) -> tuple[Workload, ...]:
    return tuple(_random(f"steady-{load}", 128, outputs, load, requests) for load, requests in loads)


TAIL = {"dataset_name": "long-tail", "long_tail_input_len": 128}
PREFIX = {"dataset_name": "random", "random_prefix_len": 512, "random_input_len": 32, "random_output_len": 32}

PROMPTS = _random("prompts", 512, 1, 8, 32)
FEW_PROMPTS = PROMPTS._replace(requests=16)
LONG = tuple(_random(f"long-{load}", 4000, 64, load, 2 * load) for load in (1, 4))

WORKLOADS = {
    SMALL.key: (
        *_steady(128, (1, 4), (8, 16), (32, 64), (64, 128)),
        Workload("long-tail", "128 in, 8 to 474 out (mean 104), 32 at a time", 32, 128, TAIL),
        Workload("shared-prefix", "512 shared + 32 in, 32 out, 16 at a time", 16, 64, PREFIX),
        PROMPTS,
        *LONG,
    ),
    MIDDLE.key: (*_steady(64, (1, 4), (8, 16), (32, 64)), PROMPTS, *LONG),
    LARGE.key: (*_steady(32, (1, 2), (8, 16)), FEW_PROMPTS),
}
"""By model, since a large one would take hours for what a small one does in minutes."""

WARM_UP = _random("warm-up", 128, 8, 8, 8)

NAMES = tuple(dict.fromkeys(one.name for workloads in WORKLOADS.values() for one in workloads))
"""Every workload's name. A shape of load has the same one for each model."""


def steady(model: str) -> tuple[Workload, ...]:
    """Return the workloads of a model whose requests are all alike, from one at a time upwards."""
    return tuple(one for one in WORKLOADS[model] if one.name.startswith("steady-"))


def write(workload: Workload, count: int, seed: int, tokenizer: Tokenizer, path: Path) -> None:
    """Draw `count` requests and write them to `path`, a line of JSON each, as `bench serve` reads its own files."""
    options = ServeOptions(num_prompts=count, **workload.shape)
    with path.open("w", encoding="utf-8") as file:
        for request in RequestGenerator(options, tokenizer, seed=seed, text=True).generate():
            tokens = tokenizer.encode(str(request.prompt))
            line = {"prompt": request.prompt, "tokens": tokens, "output_tokens": request.output_len}
            file.write(json.dumps(line) + "\n")

"""`quire bench latency`: run one batch of prompts through the engine in this process, from start to end, many times.

All runs have the same prompts, so the prefix cache is off unless --enable-prefix-caching is set.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from tqdm import tqdm

from quire.arguments import PromptType
from quire.bench.offline import model_id, sampling
from quire.bench.options import LatencyOptions
from quire.bench.output_files import check_writable, write_json
from quire.llm import LLM
from shared.hub.progress import on_terminal

PERCENTILES = (10, 25, 50, 75, 90, 99)
TOKEN_ID_LIMIT = 10_000
"""Prompts are drawn from the ids below this, as in `vllm bench latency`: the frequent ones in most vocabularies."""


def run(options: LatencyOptions, settings: Mapping[str, Any]) -> int:
    """Measure, print and save; return the exit status."""
    if options.output_json is not None:
        check_writable("--output-json", options.output_json)
    llm = LLM(**{"enable_prefix_caching": False} | dict(settings), seed=options.seed)
    limit = min(TOKEN_ID_LIMIT, llm.tokenizer.vocab_size)
    token_ids = np.random.default_rng(options.seed).integers(0, limit, (options.batch_size, options.input_len))
    prompts: list[PromptType] = [{"prompt_token_ids": ids} for ids in token_ids.tolist()]
    params = sampling(options.output_len, options.n)

    def run_once() -> float:
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    for _ in _with_bar(options.num_iters_warmup, "Warming up"):
        run_once()
    latencies = [run_once() for _ in _with_bar(options.num_iters, "Measuring")]
    average = float(np.mean(latencies))
    percentiles = dict(zip(PERCENTILES, np.percentile(latencies, PERCENTILES).tolist(), strict=True))
    print(f"Avg latency: {average} seconds")
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value} seconds")
    if options.output_json is not None:
        record = {
            "model_id": model_id(settings),
            "avg_latency": average,
            "latencies": latencies,
            "percentiles": percentiles,
        }
        write_json(options.output_json, record)
    return 0


def _with_bar(count: int, label: str) -> "tqdm[int]":
    return tqdm(range(count), desc=label, file=sys.stderr, disable=not on_terminal())

"""transformers' `generate` on static batches, in process: `drive_transformers.py FOLDER DTYPE THREADS`.

A batch runs until its longest answer is complete, and only then the next begins.
"""

import itertools
import sys
import time
from typing import Any

import torch
from closed_loop import Figures, Request, Run, figures, serve
from transformers import AutoModelForCausalLM, StoppingCriteria


class Clock(StoppingCriteria):
    """Notes the time of each step; stops nothing."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load() -> Run:
    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def batch(requests: list[Request]) -> list[list[float]]:
        longest = max(len(request["tokens"]) for request in requests)
        rows = [[0] * (longest - len(request["tokens"])) + request["tokens"] for request in requests]
        mask = [[0] * (longest - len(request["tokens"])) + [1] * len(request["tokens"]) for request in requests]
        clock = Clock()
        model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(request["output_tokens"] for request in requests),
            do_sample=False,
            stopping_criteria=[clock],
        )
        return [clock.times[: request["output_tokens"] + 1] for request in requests]

    def run(requests: list[Request], concurrency: int) -> Figures:
        began = time.perf_counter()
        starts = range(0, len(requests), concurrency)
        times = [batch(requests[start : start + concurrency]) for start in starts]
        return figures(requests, time.perf_counter() - began, list(itertools.chain.from_iterable(times)))

    return run


if __name__ == "__main__":
    serve(load)

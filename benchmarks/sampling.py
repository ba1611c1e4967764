"""Measure the cost of choosing a token: the plain and the compiled operations on rows of logits of ordinary text.

    python -m benchmarks.sampling [--rows 1,32,64] [--threads 1] [--repeats 20]

The logits are the embedded model's, over this repository's README. The table shows the CPU time of the best
of the repeats, in ms for all rows: other load on the machine disturbs it less than wall time.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.serving import ROOT
from kernels.batch_rows import BatchRows
from kernels.load import ops, reference
from kernels.ops import Ops
from kernels.sampling_metadata import SamplingMetadata
from services.worker.config import WorkerConfig
from services.worker.models.causal_lm import Inputs
from services.worker.start import start_runner
from shared.hub.checkpoint import locate
from shared.text.tokenizer import Tokenizer

PARAMETERS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature 0.8": (0.8, 0, 1.0, 0.0),
    "temperature 1": (1.0, 0, 1.0, 0.0),
    "top_k 50": (1.0, 50, 1.0, 0.0),
    "min_p 0.05": (1.0, 0, 1.0, 0.05),
    "top_p 0.95": (1.0, 0, 0.95, 0.0),
    "temperature 0.2, top_p 0.9": (0.2, 0, 0.9, 0.0),
}
TOKENS_PER_ROW = 4  # of the text, for each row of logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,64")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = [int(size) for size in options.rows.split(",")]
    logits = text_logits(max(sizes))
    kernels = (reference(), ops(torch.device("cpu")))
    print(f"| ms, plain → compiled | {' | '.join(f'{size} rows' for size in sizes)} |\n|{'---|' * (len(sizes) + 1)}")
    for name, parameters in PARAMETERS.items():
        cells = [
            " → ".join(f"{sampling(one, logits[-size:], parameters, options.repeats):.2f}" for one in kernels)
            for size in sizes
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    cells = [" → ".join(f"{penalising(one, logits[-size:], options.repeats):.2f}" for one in kernels) for size in sizes]
    print(f"| penalties, 256 tokens | {' | '.join(cells)} |", flush=True)
    cells = [" → ".join(f"{scoring(one, logits[-size:], options.repeats):.2f}" for one in kernels) for size in sizes]
    print(f"| 5 log-probabilities | {' | '.join(cells)} |")


@torch.inference_mode()
def text_logits(rows: int) -> Tensor:
    """Return the model's logits (rows, V) after every fourth token of the text."""
    runner = start_runner(WorkerConfig())
    ids = Tokenizer.load(locate("")).encode((ROOT / "README.md").read_text())[: rows * TOKENS_PER_ROW]
    count, blocks = len(ids), -(-len(ids) // 16)
    layout, decoder = runner._layout(16), runner._model
    decoder.prepare_positions(count)
    plan = runner._ops.plan_attention(
        BatchRows.of(torch.tensor([0, count]), torch.tensor([0])),
        torch.arange(blocks, dtype=torch.int32)[None],
        block_size=16,
        num_kv_heads=layout.num_kv_heads,
    )
    positions = torch.arange(count)
    caches = layout.views(layout.allocate(blocks, runner.device))
    hidden = decoder.forward(Inputs(torch.tensor(ids), positions, positions, plan), caches)
    return decoder.logits(hidden[TOKENS_PER_ROW - 1 :: TOKENS_PER_ROW]).clone()


def sampling(kernels: Ops, logits: Tensor, parameters: tuple[float, int, float, float], repeats: int) -> float:
    rows = np.arange(len(logits))
    temperature, top_k, top_p, min_p = parameters
    metadata = SamplingMetadata(
        rows=rows,
        temperature=np.full(len(rows), temperature, np.float32),
        top_k=np.full(len(rows), top_k),
        top_p=np.full(len(rows), top_p, np.float32),
        min_p=np.full(len(rows), min_p, np.float32),
        seeds=rows * 977,
        samples=rows * 0,
        positions=rows,
        masks=np.full(len(rows), -1),
    )
    return best(lambda: kernels.sample(logits, metadata), repeats)


def penalising(kernels: Ops, logits: Tensor, repeats: int) -> float:
    rows = len(logits)
    tokens = (torch.arange(rows * 256, dtype=torch.int32) * 7919 % 30000).view(rows, 256)
    lengths = torch.full((rows,), 256)
    scales = (torch.full((rows,), value) for value in (1.2, 0.5, 0.5))
    arguments = (tokens, lengths // 2, lengths, *scales)
    return best(lambda: kernels.penalties(logits, *arguments), repeats)


def scoring(kernels: Ops, logits: Tensor, repeats: int) -> float:
    tokens = logits.argmax(-1)
    return best(lambda: kernels.logprobs(logits, tokens, 5), repeats)


def best(call: Callable[[], object], repeats: int) -> float:
    """Return the CPU time of the fastest of `repeats` calls, in milliseconds."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return min(seconds) * 1e3


if __name__ == "__main__":
    main()

"""Tests models served by transformers' code in the real engine: prefix hits, chunks and preemption change nothing.

Oracle: transformers alone, over each prompt and its output at once. A greedy token must be the one that it finds
likeliest, up to the first position at which its two best are nearer than the margin rule allows.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from quire.engine import InProcessEngine
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.protocol import Sampling
from tests.exactness.embedded_model import Output, Request, serve
from tests.exactness.margin_rule import MOST, TOLERANCE
from tests.models.fallback_models import MODELS
from tests.models.tiny_models import reference_logits, save

BLOCK = 8
TOKENS = 20  # of output


def requests(vocab_size: int) -> list[Request]:
    """Return prompts of all lengths, in pairs with a common prefix."""
    rng = random.Random(3)
    result = []
    for length in (1, 7, 8, 17, 40, 63):
        prompt = [rng.randrange(3, vocab_size) for _ in range(length)]
        tail = [rng.randrange(3, vocab_size) for _ in range(5)]
        sampling = Sampling(max_tokens=TOKENS, seed=0, temperature=0.0, logprobs=2)
        result += [Request(prompt, sampling), Request(prompt + tail, sampling)]
    return result


def assert_likeliest(model: PreTrainedModel, asked: Sequence[Request], outputs: Sequence[Output]) -> None:
    compared = 0
    for request, output in zip(asked, outputs, strict=True):
        logits = reference_logits(model, [*request.prompt, *output.run.tokens])[len(request.prompt) - 1 :]
        for token, row in zip(output.run.tokens, logits, strict=False):
            best = row.topk(2)
            if best.values[0] - best.values[1] <= TOLERANCE:
                break
            assert token == best.indices[0]
            compared += 1
    assert compared > MOST * TOKENS * len(asked)


@pytest.mark.parametrize("name", ["stablelm", "gpt_neox", "cohere2", "deepseek_v3", "granite"])
def test_prefix_hits_chunks_and_preemption(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    asked = requests(model.config.vocab_size)
    worker = WorkerConfig(model=str(save(model, tmp_path)), device="cpu", dtype="float32", num_threads=1)
    scheduler = SchedulerConfig(num_gpu_blocks_override=20, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=24)
    engine = InProcessEngine(scheduler, worker)
    crowded = serve(engine, asked)
    assert engine.engine.snapshot.preemptions > 0
    assert max(len(request.prompt) for request in asked) > 2 * 24  # so that some come in pieces
    assert_likeliest(model, asked, crowded)
    one_by_one = [serve(engine, [request])[0] for request in asked]
    assert all(output.cached_tokens >= BLOCK for output in one_by_one[5::2])  # the second of each longer pair
    assert_likeliest(model, asked, one_by_one)

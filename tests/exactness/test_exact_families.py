"""Tests each family in the engine: with chunks, prefix hits and preemption, it gives the tokens of transformers.

Tiny random models, greedy, in float32. Where transformers' two likeliest tokens are closer than the margin rule's
tolerance, either will do; among themselves, our runs are equal.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from quire.engine import InProcessEngine
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.params import MAX_LOGPROBS
from shared.protocol import Sampling
from tests.exactness.embedded_model import Output, Request, serve
from tests.exactness.equality import assert_alike
from tests.exactness.margin_rule import TOLERANCE, Run
from tests.models.family_variants import VARIANTS
from tests.models.tiny_models import reference_logits, save

SERVED = (
    "llama", "opt", "mistral", "qwen2, window above", "qwen3", "gemma", "gemma2", "gemma3", "phi3",
    "phi3, part of each head", "gpt2", "mixtral, window", "qwen3_moe, some dense",
)  # fmt: skip
BLOCK = 8
COMMON = 24  # tokens that every other prompt begins with


class Subject(NamedTuple):
    model: PreTrainedModel
    folder: Path

    def engine(self, **settings: Any) -> InProcessEngine:
        worker = WorkerConfig(
            model=str(self.folder), device="cpu", dtype="float32", num_threads=1, kv_cache_memory=0.05
        )
        return InProcessEngine(SchedulerConfig(block_size=BLOCK, max_model_len=64, **settings), worker)


@pytest.fixture(params=SERVED)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    model = VARIANTS[request.param]()
    return Subject(model, save(model, tmp_path))


def requests() -> list[Request]:
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 131, (8, 46), generator=rng).tolist()
    sampling = Sampling(max_tokens=16, seed=0, temperature=0.0, logprobs=MAX_LOGPROBS)
    return [
        Request(row[: 50 - 6 * index] if index % 2 else tokens[0][:COMMON] + row[COMMON : 46 - 3 * index], sampling)
        for index, row in enumerate(tokens)
    ]


def runs(outputs: Sequence[Output]) -> list[Run]:
    return [output.run for output in outputs]


def assert_greedy(model: PreTrainedModel, request: Request, run: Run) -> None:
    """Fail unless each token is the one that transformers finds likeliest after all tokens before it."""
    logits = reference_logits(model, request.prompt + run.tokens)[len(request.prompt) - 1 : -1]
    best, chosen = logits.amax(-1), logits[range(len(run.tokens)), run.tokens]
    assert (best - chosen).max() < TOLERANCE
    reported = torch.tensor([entry.logprob for entry in run.entries])
    assert (reported - torch.log_softmax(logits, -1)[range(len(run.tokens)), run.tokens]).abs().max() < 1e-4


def test_the_engine_gives_what_transformers_gives(subject: Subject) -> None:
    asked = requests()
    roomy = subject.engine(enable_prefix_caching=False)
    alone = [serve(roomy, [request])[0] for request in asked]
    for request, output in zip(asked, alone, strict=True):
        assert_greedy(subject.model, request, output.run)

    crowded = subject.engine(num_gpu_blocks_override=13, max_num_seqs=8, max_num_batched_tokens=20)
    together = serve(crowded, asked)
    assert crowded.engine.snapshot.preemptions > 0
    assert_alike(runs(alone), runs(together), 131)
    assert sum(output.cached_tokens > 0 for output in together) > 0  # found in the cache though the pool is crowded

    caching = subject.engine()
    serve(caching, asked[:1])
    again = serve(caching, asked)
    assert [output.cached_tokens for output in again[:4]] == [40, 0, COMMON, 0]
    assert_alike(runs(alone), runs(again), 131)

"""`quire serve` with the GPU's kernels, run by Triton's interpreter on a CPU, gives the tokens of the CPU's kernels.

Sums are in another order, so the margin rule says which tokens must be equal. The server with the CPU's kernels has
room for all; that with the GPU's preempts, finds prompts in its cache, forks and loses its worker.
"""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.protocol import Sampling
from tests.exactness.chat_client import ChatClient, Question, chat_client, check_whole
from tests.exactness.margin_rule import assert_same
from tests.models.tiny_models import llama, save
from tests.quire.quire_server import Server, serving
from tests.text.vocabulary import make_tokenizer, write_model_folder

NAME = "tiny"
PREEMPTIONS = "vllm:num_preemptions"
INTERPRETED = "the GPU's kernels are interpreted"
BLOCK = 8
TOKENIZER = make_tokenizer()
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 12, "top_p": 1.0}
NUCLEUS: dict[str, Any] = {"temperature": 1.3, "top_k": 18, "top_p": 0.9}
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
FLAGS = ["--device=cpu", "--dtype=float32", f"--block-size={BLOCK}", "--max-num-seqs=8"]


def questions() -> list[Question]:
    """Return questions with a common beginning, of answers that take 28 blocks together if none shares any."""
    kinds = [(" one", GREEDY, 1), (" two", SAMPLED, 2), (" three", NUCLEUS, 1), (" four", GREEDY, 1), ("", SAMPLED, 2)]
    return [
        Question(f"hello two three four five six{end}", Sampling(max_tokens=12, seed=70 + at, **params), n)
        for at, (end, params, n) in enumerate(kinds)
    ]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a random model, so small that a step takes tenths of a second."""
    folder = write_model_folder(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return save(llama(vocab_size=TOKENIZER.vocab_size, **sizes, **heads), folder)


@asynccontextmanager
async def chatting(
    model: Path, folder: Path, *flags: str, interpreted: bool
) -> AsyncIterator[tuple[Server, ChatClient]]:
    variables = {"TRITON_INTERPRET": "1" if interpreted else "0"}
    with serving(model, folder, *FLAGS, *flags, name=NAME, variables=variables) as server:
        async with chat_client(server, NAME, TOKENIZER) as client:
            yield server, client


def count_preemptions(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
        return sum(sample.value for family in families if family.name == PREEMPTIONS for sample in family.samples)


async def test_interpreted_gpu_kernels_serve_the_tokens_of_the_cpu(model: Path, tmp_path: Path) -> None:
    asked = questions()
    async with chatting(model, tmp_path / "cpu", interpreted=False) as (server, client):
        expected = check_whole(await client.ask_all(asked), TOKENIZER)
        assert INTERPRETED not in server.err.read_text()
    async with chatting(model, tmp_path / "gpu", "--num-gpu-blocks-override=16", interpreted=True) as (server, client):
        first = await client.ask_all(asked[:1])
        together = await client.ask_all(asked)
        preemptions = await asyncio.to_thread(count_preemptions, server.url)
        killed = await client.ask_all(asked[:2], killed=server)
        log = server.err.read_text()
    assert first[0].cached_tokens == 0
    assert all(reply.cached_tokens >= BLOCK for reply in together)
    assert preemptions > 0
    for replies in (first, together, killed):
        runs = check_whole(replies, TOKENIZER)
        assert_same(expected[: len(runs)], runs, TOKENIZER.vocab_size)
    assert log.count(INTERPRETED) == log.count("captured 4 graphs") == 2  # of two workers

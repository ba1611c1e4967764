"""Compares greedy continuations of the embedded model, all in one batch, with transformers in float32."""

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from services.worker.config import WorkerConfig
from services.worker.start import start_runner
from shared.hub.checkpoint import locate
from tests.gguf import transformers_reference
from tests.worker.runner_client import RunnerClient, sequence

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "List three colours of the rainbow:",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "To be, or not to be,",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
    "Dear Sir or Madam,\n",
    "Die Hauptstadt von Deutschland ist",
]
COUNT = 64
MARGIN = 1e-3
"""Where the two best logits are nearer than this, arithmetic in another order may choose the other."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(locate(""))
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


def ours(prompts: list[list[int]]) -> list[list[int]]:
    """Return the outputs of all prompts in one batch, in uneven chunks first, with their blocks dealt out in turn."""
    runner = start_runner(WorkerConfig(model="", device="cpu", dtype="float32"))
    client = RunnerClient(runner, slots=10, blocks=70, block_size=16)
    lengths = [len(prompt) for prompt in prompts]
    new = [sequence(slot, prompt, range(slot, 70, 10)) for slot, prompt in enumerate(prompts)]
    client.run(*((slot, 0, length // 2, 0) for slot, length in enumerate(lengths)), new=new)
    rows = client.run(*((slot, length // 2, length - length // 2, 1) for slot, length in enumerate(lengths)))
    outputs = [rows[slot].tokens for slot in range(10)]
    for step in range(COUNT - 1):
        rows = client.run(*((slot, length + step, 1, 1) for slot, length in enumerate(lengths)))
        for slot, output in enumerate(outputs):
            output += rows[slot].tokens
    return outputs


def theirs(model: PreTrainedModel, prompt: list[int], output: list[int]) -> Tensor:
    """Return transformers' logits (COUNT, V) after the prompt and after each token of our output, from one pass."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([prompt + output[:-1]])).logits[0]
    return logits[len(prompt) - 1 :]


def test_greedy_as_transformers(prompts: list[list[int]]) -> None:
    model = transformers_reference.from_quire_tensors(locate(""))
    compared = 0
    for prompt, output in zip(prompts, ours(prompts), strict=True):
        logits = theirs(model, prompt, output)
        best = logits.topk(2, dim=-1)
        near = (best.values[:, 0] - best.values[:, 1] < MARGIN).nonzero()
        end = int(near[0]) if len(near) else COUNT
        assert output[:end] == best.indices[:end, 0].tolist()
        compared += end
    assert compared > 0.9 * COUNT * len(prompts)

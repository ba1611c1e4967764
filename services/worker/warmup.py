"""The first steps of a worker. They warm up, and measure the cost of a step.

Those of `warm_up` come before the worker registers, and are steps like any other, on a small KV memory. The scheduler
predicts the time of a step from two numbers that are measured here: its fixed cost, and the cost of one more token.
Those of `kernel_plans` come after it was configured, so that a GPU's kernels are compiled for these sizes by then.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from services.worker.config import WorkerConfig
from services.worker.interface import Runner
from services.worker.models.causal_lm import ModelShape
from shared.config import tokens_of_largest_step
from shared.protocol import Configure, Epoch, NewSequence, Row, Sampling, StepPlan, pack_tokens
from shared.text.lark import ANY_TEXT

_BLOCK_SIZE = 16
_PREFILL_TOKENS = {"cpu": 128, "cuda": 2048}
_REPEATS = 3
_ENOUGH_SECONDS = 0.5
_MIN_SECONDS = 1e-7  # differences of measured times can be anything
_ANY_TEXT = f"start: {ANY_TEXT}"


class Measurements(NamedTuple):
    """The cost of a step."""

    step_seconds: float  # of any step
    token_seconds: float  # of one more token


class StepMemory(NamedTuple):
    """The bytes that steps of the largest size take on a GPU, beside weights and KV."""

    states: int  # of the sequences, and tables by position
    activations: int  # at the peak of a step
    graphs: int

    @property
    def total(self) -> int:
        return sum(self)


def warm_up(runner: Runner, shape: ModelShape, device: torch.device) -> Measurements:
    """Run a prefill and a decode step up to a few times. Configure `runner` again afterwards."""
    count = max(2, min(_PREFILL_TOKENS[device.type], shape.max_positions - 1))
    blocks = -(-(count + 1) // _BLOCK_SIZE)
    epoch = Epoch(boot_id="warm-up", count=0)
    runner.configure(
        Configure(
            epoch=epoch,
            block_size=_BLOCK_SIZE,
            num_blocks=blocks,
            max_num_seqs=1,
            max_model_len=count + 1,
            max_num_batched_tokens=count,
        )
    )
    tokens = pack_tokens(index % shape.vocab_size for index in range(count))
    sampling = Sampling(max_tokens=1, seed=0, temperature=1.0, top_p=0.9)
    sequence = NewSequence(
        slot=0, tokens=tokens, prompt_len=count, blocks=list(range(blocks)), sampling=sampling, sample=0
    )
    plan = StepPlan(epoch=epoch, step=0, new_sequences=[sequence], rows=[Row(slot=0, start=0, count=count, samples=1)])
    runner.launch(plan).result()

    def seconds(start: int, size: int) -> float:
        again = StepPlan(epoch=epoch, step=1, rows=[Row(slot=0, start=start, count=size, samples=1)])
        return runner.launch(again).result().seconds

    prefill, decode = _fastest(lambda: seconds(0, count), _ENOUGH_SECONDS), _fastest(lambda: seconds(count - 1, 1))
    token_seconds = max((prefill - decode) / (count - 1), _MIN_SECONDS)
    step_seconds = max(decode - token_seconds, _MIN_SECONDS)
    return Measurements(step_seconds, token_seconds)


def _fastest(measure: Callable[[], float], enough: float = math.inf) -> float:
    """Return the least of a few measured times. None is measured after `enough` seconds: long ones vary little, and a
    large model's would delay the start.
    """
    times = [measure()]
    while len(times) < _REPEATS and sum(times) < enough:
        times.append(measure())
    return min(times)


def largest_sizes(config: WorkerConfig, shape: ModelShape, device: torch.device) -> Configure:
    """Return the sizes that the scheduler will choose at most on a GPU, with a single block of KV."""
    max_model_len = min(config.max_model_len or shape.max_positions, shape.max_positions)
    tokens = tokens_of_largest_step(config.max_num_batched_tokens, config.max_num_seqs, device.type)
    return Configure(
        epoch=Epoch(boot_id="largest", count=0),
        block_size=_BLOCK_SIZE,
        num_blocks=1,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=tokens,
    )


def largest_plan(sizes: Configure, *, adapters: bool = False) -> StepPlan:
    """Return a step of the most tokens and rows, all of which sample with filters, penalties, a mask and
    log-probabilities, and use an adapter if there are `adapters`.

    As few sequences as can take the tokens are prompts from their beginning, with log-probabilities too; the others
    decode at the end of the longest context. All their blocks are the first one, so it computes nonsense.
    """
    tokens, length = sizes.max_num_batched_tokens, sizes.max_model_len
    num_rows = min(sizes.max_num_seqs, tokens)
    left = tokens - num_rows  # besides one for each row
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 0.5, "frequency_penalty": 1.0, "logprobs": 0}
    params["grammar"] = _ANY_TEXT
    sampling = Sampling(max_tokens=1, seed=0, prompt_logprobs=0, **params)
    rows, new = [], []
    for slot in range(num_rows):
        more = min(left, length - 1)
        left -= more
        rows.append(Row(slot, 0, more + 1, 1) if more else Row(slot, length - 1, 1, 1))
        tokens_of_row = pack_tokens([0] * (more + 1))
        adapter_slot = 0 if adapters else -1
        new.append(NewSequence(slot, tokens_of_row, more + 1, [0], sampling, 0, adapter_slot=adapter_slot))
    return StepPlan(sizes.epoch, 0, rows, new_sequences=new)


def kernel_plans(sizes: Configure, vocab_size: int, *, adapters: bool = False) -> Iterator[StepPlan]:
    """Yield steps that launch every kernel that a later step may need: chunks, short and long contexts, each kind of
    sampling, masks, log-probabilities in lists of each size that has a kernel of its own, a copied block, and those of
    `adapters`.

    They compute with memory that holds no sequence, so what they sample means nothing.
    """
    chunk = min(64, sizes.max_num_batched_tokens, sizes.max_model_len)
    rows = [Row(0, 0, chunk, 1), Row(0, 0, 1, 1), Row(0, sizes.max_model_len - 1, 1, 1)]
    for step, params in enumerate(_SAMPLING_KINDS):
        number = min(params["logprobs"], vocab_size)
        sampling = Sampling(max_tokens=1, seed=0, prompt_logprobs=number, **params | {"logprobs": number})
        sequence = NewSequence(0, pack_tokens([0] * chunk), chunk, [0], sampling, 0)
        if adapters and step == 0:
            yield StepPlan(sizes.epoch, 0, rows[:1], new_sequences=[replace(sequence, adapter_slot=0)])
        for row in rows:
            copies = [(0, 1)] if sizes.num_blocks > 1 else []
            yield StepPlan(sizes.epoch, step, [row], new_sequences=[sequence], block_copies=copies)


_SAMPLING_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 1.0, "logprobs": 5},
    {"temperature": 0.0, "logprobs": 0, "grammar": _ANY_TEXT},
    {"temperature": 1.0, "top_p": 0.5, "logprobs": 20},
    {"temperature": 1.0, "top_p": 0.5, "repetition_penalty": 2.0, "logit_bias": [(0, 1.0)], "logprobs": 21},
]

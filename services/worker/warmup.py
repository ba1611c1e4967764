"""The first steps of a worker, before it registers: so that the next ones are fast, and to know how fast.

They are steps like any other, on a small KV memory of their own. Their times give the two numbers by which a
scheduler predicts a step: what it costs at all, and what one more token adds.
"""

from typing import NamedTuple, Protocol

import torch

from services.worker.models.causal_lm import Shape
from shared.protocol import Configure, Epoch, NewSequence, Row, Sampling, StepPlan, StepResult, pack_tokens

_BLOCK = 16
_TOKENS = {"cpu": 128, "cuda": 2048}  # of the long step
_REPEATS = 3
_LARGEST_STEP = 8192  # tokens; activations are extrapolated to it, since the scheduler's limit is not known yet
_LEAST = 1e-7  # seconds; differences of measured times can be anything


class Steps(Protocol):
    """The part of a runner that is needed here."""

    def configure(self, message: Configure) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult: ...


class Speeds(NamedTuple):
    step_seconds: float
    token_seconds: float
    activations: int  # bytes that a large step takes on a GPU, beside weights and KV


def warm_up(steps: Steps, shape: Shape, device: torch.device) -> Speeds:
    """Run a long and a short step a few times. Leaves `steps` configured for these; configure it anew."""
    count = max(2, min(_TOKENS[device.type], shape.max_positions - 1))
    blocks = -(-(count + 1) // _BLOCK)
    epoch = Epoch(boot_id="warm-up", count=0)
    steps.configure(
        Configure(
            epoch=epoch,
            block_size=_BLOCK,
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
    held = _begin_peak(device)
    steps.execute(
        StepPlan(epoch=epoch, step=0, new_sequences=[sequence], rows=[Row(slot=0, start=0, count=count, samples=1)])
    )
    peak = _peak(device) - held
    long, short = (
        min(
            steps.execute(StepPlan(epoch=epoch, step=1, rows=[Row(slot=0, start=start, count=size, samples=1)])).seconds
            for _ in range(_REPEATS)
        )
        for start, size in ((0, count), (count - 1, 1))
    )
    token_seconds = max((long - short) / (count - 1), _LEAST)
    return Speeds(max(short - token_seconds, _LEAST), token_seconds, peak * max(1, _LARGEST_STEP // count))


def _begin_peak(device: torch.device) -> int:
    """Bytes held now; the peak counts from here."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0

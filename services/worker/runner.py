"""The runner: a model on a device that computes the plans it is given, one after the other.

It owns weights, KV memory and slots, and knows nothing of sockets, queues or who waits for the tokens. The worker's
service and the offline `LLM` drive it alike: make one, `configure` it, `execute` plans.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from kernels.layout import KVLayout
from kernels.load import ops as load_ops
from services.worker import logprobs as report
from services.worker.batch import Batch, build
from services.worker.config import WorkerConfig
from services.worker.cpu_tuning import keep_freed_memory, pin_threads, set_threads, use_huge_pages
from services.worker.kv_memory import kv_memory
from services.worker.models.load import choose_device, load_model
from services.worker.sampler import Draws, Sampler
from services.worker.slots import Slots
from services.worker.warmup import warm_up
from shared.hub.checkpoint import locate, text_digest
from shared.hub.embedded import EMBEDDED
from shared.protocol import Configure, Fork, ModelInfo, SampledRow, StepPlan, StepResult, TokenLogprobs


class WorkerInfo(Struct, frozen=True):
    """What a worker tells its scheduler of itself: the body of `Register`."""

    model: ModelInfo
    device: str
    kv_bytes_per_token: int
    kv_memory: int
    step_seconds: float
    token_seconds: float


@dataclass(frozen=True)
class _Epoch:
    """What one `Configure` made."""

    layout: KVLayout
    storage: Tensor
    caches: list[tuple[Tensor, Tensor]]
    state: Slots
    sampler: Sampler


class Runner:
    """Loads the model and warms up. Raises ModelError or ConfigError if that cannot be done.

    In a process that is there for it alone, it may choose where that one's threads run.
    """

    def __init__(self, config: WorkerConfig, *, alone: bool = False) -> None:
        keep_freed_memory()
        set_threads(config.num_threads)
        self.device = choose_device(config.device)
        self._ops = load_ops(self.device)
        self._pins = alone and self.device.type == "cpu"
        folder = locate(config.model, config.revision, config.download_dir)
        model = load_model(folder, config, self.device, self._ops)
        if self.device.type == "cpu":
            use_huge_pages()
        self._decoder, self._kv_dtype = model.decoder, model.precision.kv_dtype
        self._epoch: _Epoch | None = None
        speeds = warm_up(self, self._decoder.shape, self.device)
        self._epoch = None
        shape = self._decoder.shape
        self._info = WorkerInfo(
            model=ModelInfo(
                name=config.model or EMBEDDED,
                architecture=shape.architecture,
                dtype=model.precision.name,
                max_positions=shape.max_positions,
                vocab_size=shape.vocab_size,
                fingerprint=model.fingerprint,
                weights_digest=model.weights_digest,
                text_digest=text_digest(folder),
            ),
            device=str(self.device),
            kv_bytes_per_token=self._layout(block_size=1).bytes_per_token,
            kv_memory=kv_memory(config, self.device, speeds.activations),
            step_seconds=speeds.step_seconds,
            token_seconds=speeds.token_seconds,
        )

    @property
    def info(self) -> WorkerInfo:
        return self._info

    def configure(self, message: Configure) -> None:
        """Begin an epoch: empty slots, and KV memory of `num_blocks`. What was there before is gone."""
        self._epoch = None  # frees the old memory before the new is taken
        self._epoch = self._begin(message)
        if self._pins:  # once: the sockets have their threads by now
            self._pins = False
            pin_threads()
        self._decoder.reach(self._epoch.state.tokens.shape[1])

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step of the epoch that was configured."""
        if self._epoch is None:
            raise RuntimeError("a plan came before any configuration")
        began = time.perf_counter()
        self._epoch.state.apply(plan)
        if plan.block_copies:
            sources, destinations = torch.tensor(plan.block_copies, device=self.device).T
            self._ops.copy_blocks(self._epoch.storage, sources, destinations)
        rows = self._compute(plan, self._epoch) if plan.rows else []
        return StepResult(epoch=plan.epoch, step=plan.step, rows=rows, seconds=time.perf_counter() - began)

    def _begin(self, message: Configure) -> _Epoch:
        layout = self._layout(message.block_size)
        storage = layout.allocate(message.num_blocks, self.device)
        state = Slots(message, self._decoder.shape.vocab_size, self.device)
        return _Epoch(layout, storage, layout.views(storage), state, Sampler(state, self._ops))

    def _layout(self, block_size: int) -> KVLayout:
        shape = self._decoder.shape
        return self._ops.kv_layout(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, self._kv_dtype)

    def _compute(self, plan: StepPlan, epoch: _Epoch) -> list[SampledRow]:
        batch = build(plan.rows, epoch.state, epoch.layout, self._ops)
        hidden = self._decoder.forward(batch.inputs, epoch.caches)
        prompts = report.prompt_logprobs(hidden, batch, epoch.state, self._decoder, self._ops)
        draws = draws_of(batch, plan.forks)
        tokens, logprobs = self._sample(hidden, batch, draws, epoch) if len(draws) else ([], {})
        rows = [
            SampledRow(slot, [token], logprobs.get(slot), prompts.pop(slot, None))
            for slot, token in zip(draws.slots.tolist(), tokens, strict=True)
        ]
        return rows + [SampledRow(slot, [], None, found) for slot, found in prompts.items()]

    def _sample(
        self, hidden: Tensor, batch: Batch, draws: Draws, epoch: _Epoch
    ) -> tuple[list[int], dict[int, list[TokenLogprobs]]]:
        """The drawn tokens, put into their slots, and log-probabilities by slot where they are wanted."""
        last = torch.from_numpy(batch.offsets[1:][batch.samples > 0] - 1).to(self.device)
        logits = self._decoder.logits(hidden[last])
        tokens = epoch.sampler.sample(logits, draws)
        slots, positions = (torch.from_numpy(array).to(self.device) for array in (draws.slots, draws.positions))
        epoch.state.put(slots, positions, tokens)
        return tokens.tolist(), report.sampled_logprobs(logits, tokens, draws, epoch.state, self._ops)


def draws_of(batch: Batch, forks: Sequence[Fork]) -> Draws:
    """A draw for each sampling row, and behind them one for each child of a fork, from its parent's logits."""
    sampling = batch.samples > 0
    slots, positions = batch.slots[sampling], (batch.starts + batch.counts)[sampling]
    rows = np.arange(len(slots))
    row_of = dict(zip(slots.tolist(), rows.tolist(), strict=True))
    children = [(child, row_of[fork.parent]) for fork in forks for child, _ in fork.children]
    if children:
        child_slots, parents = np.array(children, np.int64).T
        slots = np.concatenate((slots, child_slots))
        positions = np.concatenate((positions, positions[parents]))
        rows = np.concatenate((rows, parents))
    return Draws(slots, positions, rows)

"""`ModelRunner`: a model on a device that computes the plans it is given, one after the other.

It owns weights, KV memory and the state of running sequences, and knows nothing of sockets, queues or who waits for
the tokens. The worker's service and the offline `LLM` drive it alike: they `configure` it and then `execute` plans.
How a model is loaded and the process tuned is the business of `start.py`.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layout import KVLayout
from kernels.ops import Ops
from services.worker.batch import Batch, build_batch
from services.worker.config import WorkerConfig
from services.worker.interface import WorkerInfo
from services.worker.kv_memory import kv_memory
from services.worker.logprobs import prompt_logprobs, sampled_logprobs
from services.worker.models.load import LoadedModel
from services.worker.sampler import Sampler, SamplingBatch, build_sampling_batch
from services.worker.sequence_states import SequenceStates
from services.worker.warmup import warm_up
from shared.protocol import Configure, ModelInfo, SampledRow, StepPlan, StepResult, TokenLogprobs


@dataclass(frozen=True)
class _Epoch:
    """Everything that one `Configure` allocates."""

    layout: KVLayout
    storage: Tensor
    caches: list[tuple[Tensor, Tensor]]
    states: SequenceStates
    sampler: Sampler


class ModelRunner:
    """Runs a loaded `model` on `device`; `info` describes it to other processes.

    The constructor runs a few steps to warm up and to measure. It raises ConfigError if no memory is left for KV.
    """

    def __init__(
        self, model: LoadedModel, info: ModelInfo, config: WorkerConfig, device: torch.device, ops: Ops
    ) -> None:
        self.device = device
        self._ops = ops
        self._decoder, self._kv_dtype = model.decoder, model.precision.kv_dtype
        self._epoch: _Epoch | None = None
        measured = warm_up(self, self._decoder.shape, device)
        self._epoch = None
        self._info = WorkerInfo(
            model=info,
            device=str(device),
            kv_bytes_per_token=self._layout(block_size=1).bytes_per_token,
            kv_memory=kv_memory(config, device, measured.activation_bytes),
            step_seconds=measured.step_seconds,
            token_seconds=measured.token_seconds,
        )

    @property
    def info(self) -> WorkerInfo:
        return self._info

    def configure(self, message: Configure) -> None:
        """Begin an epoch: drop all sequences and KV, and allocate KV memory of `num_blocks` blocks."""
        self._epoch = None  # frees the old memory before the new is taken
        self._epoch = self._begin_epoch(message)
        self._decoder.prepare_positions(self._epoch.states.tokens.shape[1])

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step of the epoch that was configured."""
        if self._epoch is None:
            raise RuntimeError("a plan came before any configuration")
        began = time.perf_counter()
        self._epoch.states.apply(plan)
        if plan.block_copies:
            sources, destinations = torch.tensor(plan.block_copies, device=self.device).T
            self._ops.copy_blocks(self._epoch.storage, sources, destinations)
        rows = self._compute(plan, self._epoch) if plan.rows else []
        return StepResult(epoch=plan.epoch, step=plan.step, rows=rows, seconds=time.perf_counter() - began)

    def _begin_epoch(self, message: Configure) -> _Epoch:
        layout = self._layout(message.block_size)
        storage = layout.allocate(message.num_blocks, self.device)
        states = SequenceStates(message, self._decoder.shape.vocab_size, self.device)
        return _Epoch(layout, storage, layout.views(storage), states, Sampler(states, self._ops))

    def _layout(self, block_size: int) -> KVLayout:
        shape = self._decoder.shape
        return self._ops.kv_layout(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, self._kv_dtype)

    def _compute(self, plan: StepPlan, epoch: _Epoch) -> list[SampledRow]:
        batch = build_batch(plan.rows, epoch.states, epoch.layout, self._ops)
        hidden = self._decoder.forward(batch.inputs, epoch.caches)
        prompts = prompt_logprobs(hidden, batch, epoch.states, self._decoder, self._ops)
        sampling = build_sampling_batch(batch, plan.forks)
        tokens, logprobs = self._sample(hidden, batch, sampling, epoch) if len(sampling) else ([], {})
        rows = [
            SampledRow(slot, [token], logprobs.get(slot), prompts.pop(slot, None))
            for slot, token in zip(sampling.slots.tolist(), tokens, strict=True)
        ]
        return rows + [SampledRow(slot, [], None, entries) for slot, entries in prompts.items()]

    def _sample(
        self, hidden: Tensor, batch: Batch, sampling: SamplingBatch, epoch: _Epoch
    ) -> tuple[list[int], dict[int, list[TokenLogprobs]]]:
        """Return the sampled tokens, stored in their slots too, and by slot the log-probabilities that were requested.

        `hidden` is (T, H).
        """
        last = torch.from_numpy(batch.offsets[1:][batch.samples > 0] - 1).to(self.device)
        logits = self._decoder.logits(hidden[last])
        tokens = epoch.sampler.sample(logits, sampling)
        slots, positions = (torch.from_numpy(array).to(self.device) for array in (sampling.slots, sampling.positions))
        epoch.states.store_tokens(slots, positions, tokens)
        return tokens.tolist(), sampled_logprobs(logits, tokens, sampling, epoch.states, self._ops)

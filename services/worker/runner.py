"""`ModelRunner`: a model on a device, which computes one plan after the other.

It owns weights, KV memory and the state of running sequences. It knows nothing of sockets, queues or clients. The
worker's service and the offline `LLM` both `configure` it and then `execute` plans. `start.py` loads the model and
tunes the process.
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
class _EpochState:
    """The memory of one epoch, allocated by `Configure`."""

    layout: KVLayout
    storage: Tensor
    caches: list[tuple[Tensor, Tensor]]
    sequences: SequenceStates
    sampler: Sampler


class ModelRunner:
    """Runs a `loaded` model on `device`; `info` describes it to other processes.

    The constructor runs a few steps to warm up and to measure. It raises ConfigError if no memory is left for KV.
    """

    def __init__(
        self, loaded: LoadedModel, info: ModelInfo, config: WorkerConfig, device: torch.device, ops: Ops
    ) -> None:
        self.device = device
        self._ops = ops
        self._model, self._kv_dtype = loaded.model, loaded.precision.kv_dtype
        self._state: _EpochState | None = None
        measured = warm_up(self, self._model.shape, device)
        self._state = None
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
        self._state = None  # frees the old memory before the new is taken
        self._state = self._allocate(message)
        self._model.prepare_positions(self._state.sequences.tokens.shape[1])

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step of the epoch that was configured."""
        if self._state is None:
            raise RuntimeError("a plan came before any configuration")
        began = time.perf_counter()
        self._state.sequences.apply(plan)
        if plan.block_copies:
            sources, destinations = torch.tensor(plan.block_copies, device=self.device).T
            self._ops.copy_blocks(self._state.storage, sources, destinations)
        rows = self._compute(plan, self._state) if plan.rows else []
        return StepResult(epoch=plan.epoch, step=plan.step, rows=rows, seconds=time.perf_counter() - began)

    def _allocate(self, message: Configure) -> _EpochState:
        layout = self._layout(message.block_size)
        storage = layout.allocate(message.num_blocks, self.device)
        sequences = SequenceStates(message, self._model.shape.vocab_size, self.device)
        return _EpochState(layout, storage, layout.views(storage), sequences, Sampler(sequences, self._ops))

    def _layout(self, block_size: int) -> KVLayout:
        shape = self._model.shape
        return self._ops.kv_layout(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, self._kv_dtype)

    def _compute(self, plan: StepPlan, state: _EpochState) -> list[SampledRow]:
        batch = build_batch(plan.rows, state.sequences, state.layout, self._ops)
        hidden = self._model.forward(batch.inputs, state.caches)
        prompts = prompt_logprobs(hidden, batch, state.sequences, self._model, self._ops)
        sampling = build_sampling_batch(batch, plan.forks)
        tokens, logprobs = self._sample(hidden, batch, sampling, state) if len(sampling) else ([], {})
        rows = [
            SampledRow(slot, [token], logprobs.get(slot), prompts.pop(slot, None))
            for slot, token in zip(sampling.slots.tolist(), tokens, strict=True)
        ]
        return rows + [SampledRow(slot, [], None, entries) for slot, entries in prompts.items()]

    def _sample(
        self, hidden: Tensor, batch: Batch, sampling: SamplingBatch, state: _EpochState
    ) -> tuple[list[int], dict[int, list[TokenLogprobs]]]:
        """Sample from hidden states (T, H), and store the tokens in their slots.

        Return the tokens, and the requested log-probabilities by slot.
        """
        last = torch.from_numpy(batch.offsets[1:][batch.samples > 0] - 1).to(self.device)
        logits = self._model.logits(hidden[last])
        tokens = state.sampler.sample(logits, sampling)
        slots, positions = (torch.from_numpy(array).to(self.device) for array in (sampling.slots, sampling.positions))
        state.sequences.store_tokens(slots, positions, tokens)
        return tokens.tolist(), sampled_logprobs(logits, tokens, sampling, state.sequences, self._ops)

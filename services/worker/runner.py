"""`ModelRunner`: a model on a device, which computes one plan after the other.

It owns weights, KV memory and the state of running sequences. It knows nothing of sockets, queues or clients. The
worker's service and the offline `LLM` both `configure` it and then `launch` plans. `start.py` loads the model and
tunes the process.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from kernels.batch_rows import BatchRows, RowLengths
from kernels.layout import KVLayout
from kernels.load import report_compilations
from kernels.ops import Ops
from services.worker.batch import (
    Batch,
    StagedSegments,
    build_batch,
    prepare_inputs,
    sort_by_adapter,
    stage_segments,
)
from services.worker.config import WorkerConfig
from services.worker.decode_graphs import Capture, DecodeGraphs, graph_sizes
from services.worker.host_blocks import HostBlocks, measure_bandwidth
from services.worker.interface import OutOfMemory, PendingStep, WorkerInfo
from services.worker.kv_memory import host_kv_memory, kv_memory
from services.worker.launched_step import DeferredStep, LaunchedStep, StepOutputs, StepTimer
from services.worker.logprobs import (
    StagedLogprobs,
    prompt_logprob_rows,
    prompt_logprobs,
    sampled_logprobs,
    stage_logprobs,
)
from services.worker.models.load import LoadedModel
from services.worker.sampler import Sampler, StagedSampling, build_sampling_batch
from services.worker.sequence_states import SequenceStates, StateChanges
from services.worker.token_masks import TokenMasks
from services.worker.transfers import Section, StepBuffer
from services.worker.warmup import StepMemory, kernel_plans, largest_plan, largest_sizes, warm_up
from shared.errors import ModelError
from shared.protocol import Configure, Epoch, ModelInfo, StepPlan, StepResult
from shared.text.grammars import GrammarCompiler

logger = logging.getLogger(__name__)


@contextmanager
def _naming_settings(what: str) -> Iterator[None]:
    """Raise OutOfMemory, with the settings that need less, if memory is too small within the block."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(
            f"out of the host's memory {what}: smaller --kv-cache-memory, --swap-space and --num-gpu-blocks-override "
            "need less"
        ) from error
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"out of GPU memory {what}: a smaller --gpu-memory-utilization leaves more for steps, and a smaller "
            "--max-num-batched-tokens or --max-num-seqs needs less"
        ) from error


def _no_compiler() -> GrammarCompiler:
    raise ModelError("this worker compiles no grammars")


@dataclass(frozen=True)
class _EpochState:
    """The memory of one epoch, allocated by `Configure`."""

    layout: KVLayout
    storage: Tensor
    caches: list[tuple[Tensor, Tensor]]
    host_blocks: HostBlocks
    sequences: SequenceStates
    sampler: Sampler
    masks: TokenMasks


class _Sampling(NamedTuple):
    """What sampling needs on the device, staged."""

    tokens: StagedSampling
    logprobs: list[StagedLogprobs]


class _StagedStep(NamedTuple):
    """What a plan says, in a buffer that goes to the device with the changes."""

    changes: StateChanges
    block_copies: Section | None
    batch: Batch | None
    rows: BatchRows | None  # of the batch; padded to `graph_size`
    graph_size: int  # rows of the graph that the batch runs in; 0: none
    adapters: StagedSegments | None  # the tokens of the batch that use them
    last_tokens: Section | None  # of the rows that sample, by their index in the batch
    sampling: _Sampling | None  # None: no row samples, or another stage does


class ModelRunner:
    """Runs a `loaded` model on `device`; `info` describes it to other processes.

    The constructor runs a few steps to warm up and to measure. It raises ConfigError if no memory is left for KV.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        info: ModelInfo,
        config: WorkerConfig,
        device: torch.device,
        ops: Ops,
        *,
        new_capture: Callable[[], Capture] | None = None,
        load_compiler: Callable[[], GrammarCompiler] = _no_compiler,
    ) -> None:
        """`new_capture` is called for each set of graphs of decodes; None: all steps are launched kernel by kernel.

        `load_compiler` returns what compiles grammars, or raises `QuireError` if nothing does.
        """
        self.device = device
        self._ops = ops
        self._model, self._kv_dtype = loaded.model, loaded.precision.kv_dtype
        self._adapters = loaded.adapters
        self._group, self._parallel = loaded.group, loaded.group.parallel
        self._joins = False  # whether `configure` connects the group: what comes before is measured alone
        self._state: _EpochState | None = None
        self._sizes: Configure | None = None
        self._new_capture: Callable[[], Capture] | None = None
        self._load_compiler = load_compiler
        self._graphs: DecodeGraphs | None = None
        measured = warm_up(self, self._model.shape, device)
        host_memory = host_kv_memory(config, device)
        bandwidth = measure_bandwidth(self._layout(block_size=16), device, ops) if host_memory else 0.0
        needed = self._measure_memory(config, new_capture) if device.type == "cuda" else None
        self._state = self._sizes = None
        self._new_capture = new_capture
        self._joins = self._parallel.world_size > 1
        self._info = WorkerInfo(
            model=info,
            device=str(device),
            kv_bytes_per_token=self._layout(block_size=1).bytes_per_token,
            kv_memory=kv_memory(config, device, needed),
            step_seconds=measured.step_seconds,
            token_seconds=measured.token_seconds,
            host_kv_memory=host_memory,
            swap_bytes_per_second=bandwidth,
            max_loras=config.max_loras if self._adapters else 0,
            max_cpu_loras=config.num_host_adapters if self._adapters else 0,
            num_stages=config.pipeline_parallel_size,
        )

    @property
    def info(self) -> WorkerInfo:
        return self._info

    def configure(self, message: Configure) -> None:
        """Begin an epoch: drop all sequences, KV and adapters. Memory and graphs of another epoch with these sizes are
        kept. A rank of a group waits until all ranks have come to this.
        """
        if self._joins:
            self._group.connect(f"{message.epoch.boot_id}-{message.epoch.count}")
        if self._adapters:
            self._adapters.clear()
        if self._state is not None:
            self._state.masks.clear()
        sizes = replace(message, epoch=Epoch("", 0))
        if self._state is not None and self._sizes == sizes:
            self._state.sequences.clear()
            return
        self._state = self._sizes = self._graphs = None  # frees the old memory before the new is taken
        with _naming_settings(f"for {message.num_blocks} blocks of KV"):
            self._state = self._allocate(message)
            self._model.prepare_positions(self._state.sequences.max_length)
            if self.device.type != "cpu":
                self._compile_kernels(message)
            if self._new_capture:
                forward = self._graph_forward(self._state)
                self._graphs = DecodeGraphs(graph_sizes(message.max_num_seqs), forward, self._new_capture())
        self._sizes = sizes

    def close(self) -> None:
        """Forget all sequences, and leave the group."""
        if self._state is not None:
            self._state.masks.clear()
        self._group.close()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step of the epoch that was configured, and wait for its result."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Let the device compute one step of the epoch that was configured. On a GPU this waits for nothing.

        Steps are computed in the order of their launches. On a CPU, a rank of a group computes them when their results
        are wanted, in the same order.
        """
        if self._parallel.world_size > 1 and self.device.type == "cpu":
            return DeferredStep(partial(self._launch, plan))
        return self._launch(plan)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step. All that the plan says goes to the device in one copy, and its result comes back in one."""
        if self._state is None:
            raise RuntimeError("a plan came before any configuration")
        timer = StepTimer(self.device)
        tokens = sum(row.count for row in plan.rows)
        with _naming_settings(f"in a step of {tokens} tokens and {len(plan.rows)} sequences"):
            if self._parallel.is_last_stage:
                self._state.masks.update(plan)
            outputs = self._compute(self._stage(plan, self._state), plan, self._state)
            reports = self._parallel.rank == self._parallel.sampling_rank
            step = LaunchedStep(plan, outputs, timer, reports=reports)
            self._state.masks.expect(outputs.slots, step)
            return step

    def load_adapter(self, adapter: int, path: str) -> str:
        """Read the adapter in the folder `path`, and return the digest of its files. See `Runner`."""
        if self._adapters is None:
            raise ModelError(f"{path}: this worker takes no adapters without --enable-lora")
        return self._adapters.load(adapter, path)

    def unload_adapter(self, adapter: int) -> None:
        """Drop an adapter from host memory. See `Runner`."""
        if self._adapters:
            self._adapters.unload(adapter)

    def _allocate(self, message: Configure) -> _EpochState:
        layout = self._layout(message.block_size)
        storage = layout.allocate(message.num_blocks, self.device)
        sequences = SequenceStates(message, self._model.shape.vocab_size, self.device)
        masks = TokenMasks(
            self._load_compiler,
            self._model.shape.vocab_size,
            torch.get_num_threads(),
            pin_memory=self.device.type == "cuda",
        )
        host_blocks = HostBlocks(layout, message.num_host_blocks, self.device, self._ops)
        sampler = Sampler(sequences, self._ops)
        return _EpochState(layout, storage, layout.views(storage), host_blocks, sequences, sampler, masks)

    def _layout(self, block_size: int) -> KVLayout:
        shape = self._model.shape
        return self._ops.kv_layout(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, self._kv_dtype)

    def _measure_memory(self, config: WorkerConfig, new_capture: Callable[[], Capture] | None) -> StepMemory:
        """Return the GPU memory of the largest steps. It gives back what torch keeps of freed memory."""
        sizes = largest_sizes(config, self._model.shape, self.device)
        self._state = None
        before = torch.cuda.memory_allocated(self.device)
        self.configure(sizes)
        assert self._state is not None
        allocated = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.launch(largest_plan(sizes, adapters=self._adapters is not None)).result()
        activations = torch.cuda.max_memory_allocated(self.device) - allocated
        torch.cuda.empty_cache()
        graphs = self._measure_graphs(self._state, new_capture(), config.max_num_seqs) if new_capture else 0
        self._state = None
        torch.cuda.empty_cache()
        return StepMemory(allocated - before, activations, graphs)

    def _measure_graphs(self, state: _EpochState, capture: Capture, max_num_seqs: int) -> int:
        """Return the memory of all graphs, by that of the two largest: each other one is counted like the second.

        They share memory, so what the second takes besides the first's is what a graph takes by itself.
        """
        *_, second_largest, largest = [0, *graph_sizes(max_num_seqs)]
        free = [torch.cuda.mem_get_info(self.device)[0]]
        graphs = []
        for size in (largest, second_largest):
            if size:
                graphs.append(DecodeGraphs([size], self._graph_forward(state), capture))
                torch.cuda.synchronize(self.device)
            free.append(torch.cuda.mem_get_info(self.device)[0])
        others = len(graph_sizes(max_num_seqs)) - 1
        return max(0, free[0] - free[1]) + max(0, free[1] - free[2]) * others

    def _compile_kernels(self, sizes: Configure) -> None:
        """Launch all kernels once, since those of a GPU are compiled when they are first launched."""
        began = time.perf_counter()
        report_compilations(None)  # these are meant to be
        for plan in kernel_plans(sizes, self._model.shape.vocab_size, adapters=self._adapters is not None):
            self.launch(plan)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            logger.info("launched all kernels once, in %.1f s", time.perf_counter() - began)
        report_compilations(lambda kernel: logger.warning("compiled after the start: %s", kernel))

    def _graph_forward(self, state: _EpochState) -> Callable[[int], Tensor]:
        """Return a function that computes the hidden states of the first decodes in `state`, whatever their lengths."""
        lengths = RowLengths(1, 1, state.sequences.max_length)

        @torch.inference_mode()
        def forward(size: int) -> Tensor:
            return self._forward(state.sequences.rows(size, lengths), size, state)

        return forward

    def _stage(self, plan: StepPlan, state: _EpochState) -> _StagedStep:
        """Collect what `plan` says in one buffer."""
        buffer = StepBuffer(self.device)
        changes = state.sequences.stage(plan, buffer)
        batch, rows, graph_size, adapters, last_tokens, sampling = None, None, 0, None, None, None
        if plan.rows:
            batch = build_batch(sort_by_adapter(plan.rows, state.sequences) if self._adapters else plan.rows)
            adapters = stage_segments(batch, state.sequences, buffer) if self._adapters else None
            graph_size = self._graphs.size_for(batch) if self._graphs and not adapters else 0
            rows = batch.stage(state.sequences, changes, padded_to=graph_size)
            last_tokens = buffer.add(batch.offsets[1:][batch.samples > 0] - 1)
            if self._parallel.is_last_stage and batch.samples.any():
                tokens = state.sampler.stage(build_sampling_batch(batch, plan.forks), buffer)
                sampling = _Sampling(tokens, stage_logprobs(tokens.batch, state.sequences, buffer))
        copies = buffer.add(np.array(plan.block_copies, np.int64).T) if plan.block_copies else None
        return _StagedStep(changes, copies, batch, rows, graph_size, adapters, last_tokens, sampling)

    def _compute(self, step: _StagedStep, plan: StepPlan, state: _EpochState) -> StepOutputs:
        """Launch all of a step, in the order that `StepPlan` demands."""
        outputs = StepOutputs()
        step.changes.apply(self._ops)
        state.host_blocks.swap_out(state.storage, plan.swap_out)
        if step.block_copies:
            self._ops.copy_blocks(state.storage, *step.block_copies.tensor)
        state.host_blocks.swap_in(state.storage, plan.swap_in)
        for slot, adapter in plan.adapter_slots:
            if self._adapters is None:
                raise RuntimeError("a plan names an adapter, and this worker takes none")
            self._adapters.put(slot, adapter)
        if step.batch and step.rows and step.last_tokens:
            last_tokens = step.last_tokens.tensor
            asked = prompt_logprob_rows(step.batch, state.sequences)
            every_token = step.graph_size > 0 or len(asked) > 0
            if self._graphs and step.graph_size:
                hidden = self._graphs.run(step.graph_size)
            else:
                read = None if every_token else last_tokens
                hidden = self._forward(step.rows, step.batch.num_tokens, state, step.adapters, read)
            if every_token and self._parallel.is_last_stage:
                outputs.prompts += prompt_logprobs(hidden, asked, step.batch, state.sequences, self._model, self._ops)
                hidden = hidden.index_select(0, last_tokens)
            if step.sampling:
                self._sample(hidden, step.sampling, state, outputs)
        return outputs

    def _forward(
        self,
        rows: BatchRows,
        num_tokens: int,
        state: _EpochState,
        adapters: StagedSegments | None = None,
        outputs: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (N, H) of the tokens `outputs` (N,) of `rows`, or without it those (T, H) of all."""
        inputs = prepare_inputs(rows, num_tokens, state.sequences, state.layout.num_kv_heads, self._ops)
        if adapters:
            inputs = inputs._replace(lora=adapters.segments)
        return self._model.forward(inputs._replace(outputs=outputs), state.caches)

    def _sample(self, hidden: Tensor, sampling: _Sampling, state: _EpochState, outputs: StepOutputs) -> None:
        """Sample from hidden states (N, H) of the rows that do, and store the tokens in their slots."""
        logits = self._model.logits(hidden)
        staged = sampling.tokens
        masks = None
        if len(staged.masked):
            required = state.sampler.num_required(staged.masked)
            on_host, outputs.errors = state.masks.masks(staged.masked.slots, required)
            masks = on_host.to(self.device, non_blocking=True)
        tokens = state.sampler.sample(logits, staged, masks)
        state.sequences.store_tokens(staged.slots.tensor, staged.positions.tensor, tokens)
        outputs.slots, outputs.tokens = staged.batch.slots.tolist(), tokens
        outputs.sampled = [sampled_logprobs(logits, tokens, group, self._ops) for group in sampling.logprobs]

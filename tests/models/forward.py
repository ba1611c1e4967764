"""`Forward`: runs Quire's decoder of a model folder by itself. It needs no transformers, whose import takes seconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.load import ops
from kernels.ops import Ops
from services.worker.batch import build_batch, prepare_inputs, sort_by_adapter, stage_segments
from services.worker.config import WorkerConfig
from services.worker.models.load import load_model
from services.worker.sequence_states import SequenceStates
from services.worker.transfers import StepBuffer
from shared.protocol import Configure, Epoch, NewSequence, Row, Sampling, StepPlan, pack_tokens

EPOCH = Epoch(boot_id="test", count=1)
CPU = torch.device("cpu")


class Forward:
    """Quire's decoder of a model folder, with a paged cache in which the test places each slot's blocks."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 4,
        blocks: int = 64,
        block_size: int = 4,
        device: torch.device = CPU,
        operations: Ops | None = None,
        **config: Any,
    ) -> None:
        self.ops = operations or ops(device)
        model = load_model(folder, WorkerConfig(**{"device": device.type} | config), device, self.ops)
        self.decoder, self.precision, self.fingerprint = model.model, model.precision, model.fingerprint
        self.adapters, self.group = model.adapters, model.group
        self.dtype = self.precision.kv_dtype
        shape = self.decoder.shape
        self.layout = self.ops.kv_layout(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, self.dtype)
        self.storage = self.layout.allocate(blocks, device)
        sizes = Configure(
            epoch=EPOCH,
            block_size=block_size,
            num_blocks=blocks,
            max_num_seqs=slots,
            max_model_len=128,
            max_num_batched_tokens=512,
        )
        self.state = SequenceStates(sizes, shape.vocab_size, device)
        self.decoder.prepare_positions(129)

    def enter(self, slot: int, tokens: Sequence[int], blocks: Sequence[int], adapter_slot: int = -1) -> None:
        sequence = NewSequence(
            slot=slot,
            tokens=pack_tokens(tokens),
            prompt_len=len(tokens),
            blocks=list(blocks),
            sampling=Sampling(max_tokens=1, seed=0),
            sample=0,
            adapter_slot=adapter_slot,
        )
        plan = StepPlan(epoch=EPOCH, step=0, rows=[], new_sequences=[sequence])
        self.state.stage(plan, StepBuffer(self.state.device)).apply(self.ops)

    def step(self, *rows: tuple[int, int, int], last: Mapping[int, int] | None = None) -> list[Tensor]:
        """Return logits (count, V) of each row (slot, start, count), or hidden states if another stage has the output
        layer. `last` is how many of the last tokens of each slot's row are read, instead of all.
        """
        with torch.inference_mode():
            plan = StepPlan(epoch=EPOCH, step=0, rows=[Row(*row, samples=0) for row in rows])
            buffer = StepBuffer(self.state.device)
            changes = self.state.stage(plan, buffer)
            batch = build_batch(sort_by_adapter(plan.rows, self.state))
            batch_rows = batch.stage(self.state, changes)
            adapters = stage_segments(batch, self.state, buffer)
            changes.apply(self.ops)
            inputs = prepare_inputs(batch_rows, batch.num_tokens, self.state, self.layout.num_kv_heads, self.ops)
            inputs = inputs._replace(lora=adapters.segments if adapters else None)
            counts = batch.counts
            if last is not None:
                counts = np.array([last[slot] for slot in batch.slots.tolist()])
                read = [np.arange(end - count, end) for end, count in zip(batch.offsets[1:], counts, strict=True)]
                inputs = inputs._replace(outputs=torch.from_numpy(np.concatenate(read)).to(self.state.device))
            outputs = self.decoder.forward(inputs, self.layout.views(self.storage))
            if self.group.parallel.is_last_stage:
                outputs = self.decoder.logits(outputs)
        by_slot = dict(zip(batch.slots.tolist(), outputs.split(counts.tolist()), strict=True))
        return [by_slot[slot] for slot, _, _ in rows]

"""`Adapters`: a model's adapters, in host memory by their numbers and on the device in slots.

The scheduler decides which are where. Loading reads files and packs them in any thread, while steps go on; what the
device computes with changes in `put` alone, between two steps.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from kernels.lora import LoraStack, LoraWeights, padded_rank
from kernels.ops import Ops
from services.worker.checkpoint.errors import name_folder_in_errors
from services.worker.models.adapters.peft_folder import read_adapter
from services.worker.models.adapters.targets import LoraTargets
from shared.errors import ModelError


class LoraSizes(NamedTuple):
    """The room for adapters on the device."""

    slots: int
    max_rank: int
    dtype: torch.dtype


class Adapters:
    """The adapters of one model. `stacks` has the slots of each of its linear operations.

    A rank has its part of each adapter, as `targets` says.
    """

    def __init__(self, targets: LoraTargets, sizes: LoraSizes, ops: Ops, device: torch.device) -> None:
        self._targets, self._sizes, self._ops = targets, sizes, ops
        rank = padded_rank(sizes.max_rank)
        self.stacks: dict[str, LoraStack] = {}
        for operation, members in targets.operations.items():
            outputs, (inputs, *_) = zip(*map(targets.sizes, members), strict=True)
            self.stacks[operation] = ops.new_lora(sizes.slots, rank, inputs, outputs, sizes.dtype, device)
        self._in_memory: dict[int, dict[str, LoraWeights]] = {}  # by operation, those that the adapter changes

    @torch.inference_mode()  # tensors that were saved as parameters would want gradients
    def load(self, adapter: int, path: str) -> str:
        """Read the folder at `path` into host memory, and return the digest of its files.

        Raise ModelError naming what is wrong with it; nothing of it is kept then. Steps may run meanwhile.
        """
        folder = Path(path)
        with name_folder_in_errors(folder):
            digest, parts = read_adapter(folder, self._targets, self._sizes.max_rank, self._sizes.dtype)
            weights = {}
            for operation, members in self._targets.operations.items():
                if any(member in parts for member in members):
                    by_part = [parts.get(member) for member in members]
                    weights[operation] = self._ops.pack_lora(by_part, self.stacks[operation])
        self._in_memory[adapter] = weights
        return digest

    def unload(self, adapter: int) -> None:
        """Drop an adapter from host memory."""
        self._in_memory.pop(adapter, None)

    def clear(self) -> None:
        """Drop all adapters. What the slots hold means nothing until they are put again."""
        self._in_memory.clear()

    def put(self, slot: int, adapter: int) -> None:
        """Let a slot of the device hold an adapter that was loaded. On a GPU this waits for nothing."""
        if adapter not in self._in_memory:
            raise ModelError(f"adapter {adapter} was not loaded")
        weights = self._in_memory[adapter]
        for operation, stack in self.stacks.items():
            stack.put(slot, weights.get(operation))

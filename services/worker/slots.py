"""What the worker keeps of running sequences: arrays indexed by the slot that the scheduler assigned.

Tokens and block tables live on the device, since a sampled token goes from one step into the next without passing
the host. Lengths, limits and sampling parameters live on the host, where they decide what a step has to do.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.protocol import Configure, Fork, NewSequence, Sampling, StepPlan, TableWrite

_SIGNED = 2**64  # a seed's 64 bits, read as int64


class Slots:
    """The sequences of one epoch."""

    def __init__(self, sizes: Configure, vocab_size: int, device: torch.device) -> None:
        slots, length = sizes.max_num_seqs, sizes.max_model_len + 1  # a finished sequence may get one stray row
        self.block_size = sizes.block_size
        self.vocab_size = vocab_size
        self.device = device
        self.tokens = torch.zeros((slots, length), dtype=torch.int32, device=device)
        self.tables = torch.zeros((slots, -(-length // sizes.block_size)), dtype=torch.int32, device=device)
        self.prompt_len = np.zeros(slots, np.int64)
        self.seed, self.sample = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.temperature, self.top_p, self.min_p = (np.zeros(slots, np.float32) for _ in range(3))
        self.repetition, self.presence, self.frequency = (np.zeros(slots, np.float32) for _ in range(3))
        self.top_k, self.min_tokens = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.logprobs, self.prompt_logprobs = np.full(slots, -1, np.int64), np.full(slots, -1, np.int64)
        self.biased, self.penalised = np.zeros(slots, bool), np.zeros(slots, bool)
        self.sampling: list[Sampling | None] = [None] * slots

    def apply(self, plan: StepPlan) -> None:
        """Bring the slots to where `plan`'s rows expect them; its copies are of blocks, and not done here."""
        for slot in plan.released_slots:
            self.sampling[slot] = None
        for sequence in plan.new_sequences:
            self._enter(sequence)
        for fork in plan.forks:
            self._fork(fork)
        self._write(plan.table_writes)

    def put(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Sampled tokens take their places; all three (N,) int64 on the device."""
        self.tokens[slots, positions] = tokens.int()

    def _enter(self, sequence: NewSequence) -> None:
        slot = sequence.slot
        tokens = torch.from_numpy(np.frombuffer(sequence.tokens, "<i4").astype(np.int32))
        self.tokens[slot, : len(tokens)] = tokens.to(self.device)
        self.tables[slot, : len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int32, device=self.device)
        self.prompt_len[slot] = sequence.prompt_len
        self._set(slot, sequence.sampling, sequence.sample)

    def _fork(self, fork: Fork) -> None:
        sampling = self.sampling[fork.parent]
        if sampling is None:
            raise ValueError(f"slot {fork.parent} forks, but holds no sequence")
        for slot, sample in fork.children:
            self.tokens[slot] = self.tokens[fork.parent]
            self.tables[slot] = self.tables[fork.parent]
            self.prompt_len[slot] = self.prompt_len[fork.parent]
            self._set(slot, sampling, sample)

    def _set(self, slot: int, sampling: Sampling, sample: int) -> None:
        self.sampling[slot] = sampling
        self.sample[slot] = sample
        self.seed[slot] = sampling.seed - _SIGNED if sampling.seed >= _SIGNED // 2 else sampling.seed
        self.temperature[slot], self.top_k[slot] = sampling.temperature, sampling.top_k
        self.top_p[slot], self.min_p[slot] = sampling.top_p, sampling.min_p
        self.repetition[slot] = sampling.repetition_penalty
        self.presence[slot], self.frequency[slot] = sampling.presence_penalty, sampling.frequency_penalty
        self.min_tokens[slot] = sampling.min_tokens
        self.logprobs[slot], self.prompt_logprobs[slot] = sampling.logprobs, sampling.prompt_logprobs
        self.biased[slot] = bool(sampling.logit_bias)
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self.penalised[slot] = penalties != (1, 0, 0)

    def _write(self, writes: Sequence[TableWrite]) -> None:
        """All of a step's writes at once: on a GPU each assignment is a launch."""
        slots = [write.slot for write in writes for _ in write.blocks]
        if slots:
            places = [write.index + i for write in writes for i in range(len(write.blocks))]
            blocks = [block for write in writes for block in write.blocks]
            index = torch.tensor([slots, places, blocks], device=self.device)
            self.tables[index[0], index[1]] = index[2].int()

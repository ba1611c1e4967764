"""`SequenceStates`: the state of running sequences, in arrays indexed by the scheduler's slots.

Tokens and block tables are on the device, so that a sampled token need not wait for the host before the next step.
Lengths, limits and sampling parameters are on the host, which decides what a step has to do.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.protocol import Configure, Fork, NewSequence, Sampling, StepPlan, TableWrite

_UINT64_RANGE = 2**64  # seeds are unsigned, and the arrays hold int64


class SequenceStates:
    """The sequences of one epoch. Arrays are (S,) on the host, or (S, ...) on the device, for S slots."""

    def __init__(self, sizes: Configure, vocab_size: int, device: torch.device) -> None:
        slots, length = sizes.max_num_seqs, sizes.max_model_len + 1  # a finished sequence may get one stray row
        self.block_size = sizes.block_size
        self.vocab_size = vocab_size
        self.device = device
        self.tokens = torch.zeros((slots, length), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((slots, -(-length // sizes.block_size)), dtype=torch.int32, device=device)
        self.prompt_len = np.zeros(slots, np.int64)
        self.seed, self.sample = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.temperature, self.top_p, self.min_p = (np.zeros(slots, np.float32) for _ in range(3))
        self.repetition_penalty = np.zeros(slots, np.float32)
        self.presence_penalty, self.frequency_penalty = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
        self.top_k, self.min_tokens = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.num_logprobs, self.num_prompt_logprobs = np.full(slots, -1, np.int64), np.full(slots, -1, np.int64)
        self.has_logit_bias, self.has_penalties = np.zeros(slots, bool), np.zeros(slots, bool)
        self.sampling: list[Sampling | None] = [None] * slots

    def apply(self, plan: StepPlan) -> None:
        """Apply the changes of `plan` to the slots, before its rows are computed. The caller copies blocks."""
        for slot in plan.released_slots:
            self.sampling[slot] = None
        for sequence in plan.new_sequences:
            self._add(sequence)
        for fork in plan.forks:
            self._fork(fork)
        self._write_tables(plan.table_writes)

    def store_tokens(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Store sampled tokens at their positions. All three are (N,) int64 on the device."""
        self.tokens[slots, positions] = tokens.int()

    def _add(self, sequence: NewSequence) -> None:
        slot, device = sequence.slot, self.device
        tokens = torch.from_numpy(np.frombuffer(sequence.tokens, "<i4").astype(np.int32))
        self.tokens[slot, : len(tokens)] = tokens.to(device)
        self.block_tables[slot, : len(sequence.blocks)] = torch.tensor(
            sequence.blocks, dtype=torch.int32, device=device
        )
        self.prompt_len[slot] = sequence.prompt_len
        self._set_sampling(slot, sequence.sampling, sequence.sample)

    def _fork(self, fork: Fork) -> None:
        sampling = self.sampling[fork.parent]
        if sampling is None:
            raise ValueError(f"slot {fork.parent} forks, but holds no sequence")
        for slot, sample in fork.children:
            self.tokens[slot] = self.tokens[fork.parent]
            self.block_tables[slot] = self.block_tables[fork.parent]
            self.prompt_len[slot] = self.prompt_len[fork.parent]
            self._set_sampling(slot, sampling, sample)

    def _set_sampling(self, slot: int, sampling: Sampling, sample: int) -> None:
        self.sampling[slot] = sampling
        self.sample[slot] = sample
        self.seed[slot] = sampling.seed - _UINT64_RANGE if sampling.seed >= _UINT64_RANGE // 2 else sampling.seed
        self.temperature[slot], self.top_k[slot] = sampling.temperature, sampling.top_k
        self.top_p[slot], self.min_p[slot] = sampling.top_p, sampling.min_p
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.presence_penalty[slot] = sampling.presence_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        self.min_tokens[slot] = sampling.min_tokens
        self.num_logprobs[slot], self.num_prompt_logprobs[slot] = sampling.logprobs, sampling.prompt_logprobs
        self.has_logit_bias[slot] = bool(sampling.logit_bias)
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self.has_penalties[slot] = penalties != (1, 0, 0)

    def _write_tables(self, writes: Sequence[TableWrite]) -> None:
        """Make all writes of a step in one assignment: on a GPU each assignment is a launch."""
        slots = [write.slot for write in writes for _ in write.blocks]
        if slots:
            columns = [write.index + i for write in writes for i in range(len(write.blocks))]
            blocks = [block for write in writes for block in write.blocks]
            index = torch.tensor([slots, columns, blocks], device=self.device)
            self.block_tables[index[0], index[1]] = index[2].int()

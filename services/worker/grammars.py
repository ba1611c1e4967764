"""`SequenceGrammars`: which tokens the grammars of running sequences allow.

A matcher follows one sequence. It has to have seen a sequence's last token before it can tell which may come next. On a
GPU that token is known on the host only when its step is done, so `masks` waits for it, while the device computes the
next forward pass. If a sequence comes back after a preemption or from another worker, its matcher starts from its
output so far.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from torch import Tensor

from services.worker.sequence_states import Ints
from shared.errors import QuireError
from shared.protocol import NewSequence, StepPlan, unpack_tokens
from shared.text.grammars import GrammarCompiler

Words = npt.NDArray[np.int32]

WORD = 32
"""Tokens of a word of a mask."""

MAX_ERROR = 500  # characters


class SampledTokens(Protocol):
    """A step that was launched."""

    def sampled_tokens(self) -> Sequence[int]:
        """Wait for the step. Return its tokens, one for each that was sampled."""


class Masks(NamedTuple):
    """The tokens that some sequences may sample, and why a sequence cannot go on."""

    words: Tensor  # (M, V / 32) int32 on the host
    errors: dict[int, str]  # by slot


class SequenceGrammars:
    """The matchers of sequences by slot, for a model with `vocab_size` logits a position.

    `load_compiler` is called when the first sequence has a grammar. It raises `QuireError` if there is no compiler.
    """

    def __init__(self, load_compiler: Callable[[], GrammarCompiler], vocab_size: int, num_threads: int) -> None:
        self._load_compiler = load_compiler
        self._num_words = -(-vocab_size // WORD)
        self._executor = LLExecutor(num_threads)
        self._matchers: dict[int, LLMatcher] = {}
        self._failures: dict[int, str] = {}  # of sequences that have no matcher
        self._unseen: tuple[SampledTokens, list[tuple[LLMatcher, int]]] | None = None

    def clear(self) -> None:
        """Forget all sequences."""
        self._matchers, self._failures, self._unseen = {}, {}, None

    def update(self, plan: StepPlan) -> None:
        """Follow the sequences that `plan` releases, brings and forks."""
        for slot in plan.released_slots:
            self._drop(slot)
        for sequence in plan.new_sequences:
            self._drop(sequence.slot)
            if sequence.sampling.grammar:
                self._start(sequence)
        for fork in plan.forks:
            for child, _ in fork.children:
                self._drop(child)
                self._fork(fork.parent, child)

    def masks(self, slots: Ints, num_required: Ints) -> Masks:
        """Return the masks of `slots` (M,), which have grammars. `num_required` (M,) are output tokens that must come
        before an end, unless the grammar allows nothing else.
        """
        self._see_tokens()
        words = np.full((len(slots), self._num_words), -1, np.int32)
        rows = [(self._matchers[slot], row) for row, slot in enumerate(slots.tolist()) if slot in self._matchers]
        if rows:
            self._fill(rows, words, num_required)
        errors = {slot: self._failures[slot] for slot in slots.tolist() if slot in self._failures}
        errors |= {
            int(slots[row]): f"the grammar cannot be followed: {matcher.get_error()[:MAX_ERROR]}"
            for matcher, row in rows
            if matcher.is_error()
        }
        return Masks(torch.from_numpy(words), errors)

    def expect(self, slots: Sequence[int], step: SampledTokens) -> None:
        """Take the tokens of `slots` from a step that samples one for each, when they are needed."""
        self._see_tokens()
        followed = [(self._matchers[slot], index) for index, slot in enumerate(slots) if slot in self._matchers]
        self._unseen = (step, followed) if followed else None

    def _fill(self, rows: list[tuple[LLMatcher, int]], words: Words, num_required: Ints) -> None:
        """Set the rows of `words` to the masks of their matchers."""
        compiler = self._load_compiler()
        masks = np.empty((len(words), compiler.mask_words), np.int32)
        fill_next_token_bitmask_par(self._executor, rows, masks)
        width = min(self._num_words, compiler.mask_words)  # logits are padded to more tokens than there are
        for _, row in rows:
            words[row, :width], words[row, width:] = masks[row, :width], 0
            if num_required[row] > 0:
                _forbid(words[row], compiler.eos_token_ids)

    def _see_tokens(self) -> None:
        if self._unseen is None:
            return
        (step, followed), self._unseen = self._unseen, None
        tokens = step.sampled_tokens()
        for matcher, index in followed:
            if not matcher.is_stopped():  # otherwise its sequence has ended, and this step was planned before that
                matcher.consume_token(tokens[index])

    def _start(self, sequence: NewSequence) -> None:
        try:
            matcher = self._load_compiler().matcher(sequence.sampling.grammar)
        except QuireError as error:
            self._failures[sequence.slot] = str(error)
            return
        if output := unpack_tokens(sequence.tokens)[sequence.prompt_len :].tolist():
            matcher.consume_tokens(output)
        self._matchers[sequence.slot] = matcher

    def _fork(self, parent: int, child: int) -> None:
        if parent in self._matchers:
            self._see_tokens()
            self._matchers[child] = self._matchers[parent].deep_copy()
        elif parent in self._failures:
            self._failures[child] = self._failures[parent]

    def _drop(self, slot: int) -> None:
        self._matchers.pop(slot, None)
        self._failures.pop(slot, None)


def _forbid(words: Words, tokens: Sequence[int]) -> None:
    """Take `tokens` from a mask, unless nothing else is in it."""
    bits = words.view(np.uint32).copy()
    for token in tokens:
        bits[token // WORD] &= ~np.uint32(1 << token % WORD)
    if bits.any():
        words[:] = bits.view(np.int32)

"""`SequenceGrammars`: which tokens the grammars of running sequences allow.

A matcher follows one sequence. It has to have seen a sequence's last token before it can tell which may come next. On a
GPU that token is known on the host only when its step is done, so `masks` waits for it, while the device computes the
next forward pass. If a sequence comes back after a preemption or from another worker, its matcher starts from its
output so far.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from services.worker.matchers import WORD, GrammarMatchers, Matcher, Words
from services.worker.sequence_states import Ints
from shared.errors import QuireError
from shared.protocol import Sampling, StepPlan, unpack_tokens
from shared.text.grammars import GrammarCompiler


class SampledTokens(Protocol):
    """A step that was launched."""

    def sampled_tokens(self) -> Sequence[int]:
        """Wait for the step. Return its tokens, one for each that was sampled."""


class Masks(NamedTuple):
    """The tokens that some sequences may sample, and why a sequence cannot go on."""

    words: Tensor  # (M, V / 32) int32 on the host
    errors: dict[int, str]  # by slot


class _Sequence(NamedTuple):
    """A running sequence that has a grammar."""

    sampling: Sampling
    matcher: Matcher


class SequenceGrammars:
    """The matchers of sequences by slot, for a model with `vocab_size` logits a position.

    `load_compiler` is called when the first sequence has a grammar. It raises `QuireError` if there is no compiler.
    With `pin_memory`, masks are where a GPU reads them without waiting.
    """

    def __init__(
        self,
        load_compiler: Callable[[], GrammarCompiler],
        vocab_size: int,
        num_threads: int,
        *,
        pin_memory: bool = False,
    ) -> None:
        self._pin_memory = pin_memory
        self._matchers = GrammarMatchers(load_compiler, vocab_size, num_threads)
        self._num_words = -(-vocab_size // WORD)
        self._sequences: dict[int, _Sequence] = {}
        self._failures: dict[int, str] = {}  # of sequences that have no matcher
        self._pending: tuple[SampledTokens, list[tuple[_Sequence, int]]] | None = None  # tokens not seen yet

    def clear(self) -> None:
        """Forget all sequences."""
        self._sequences, self._failures, self._pending = {}, {}, None

    def update(self, plan: StepPlan) -> None:
        """Follow the sequences that `plan` adds and forks, and no more those that it releases."""
        for slot in plan.released_slots:
            self._drop(slot)
        for new in plan.new_sequences:
            self._drop(new.slot)
            if new.sampling.grammar:
                self._start(new.slot, new.sampling, unpack_tokens(new.tokens)[new.prompt_len :].tolist())
        for fork in plan.forks:
            for child, _ in fork.children:
                self._drop(child)
                self._fork(fork.parent, child)

    def masks(self, slots: Ints, num_required: Ints) -> Masks:
        """Return the masks of `slots` (M,), which have grammars. `num_required` (M,) are output tokens that must come
        before an end, unless the grammar allows nothing else.
        """
        self._see_pending()
        on_host = torch.empty((len(slots), self._num_words), dtype=torch.int32, pin_memory=self._pin_memory)
        words = on_host.numpy()
        rows = {row: self._sequences[slot] for row, slot in enumerate(slots.tolist()) if slot in self._sequences}
        if len(rows) < len(words):
            words[:] = -1  # what a sequence without a matcher samples does not count
        self._matchers.fill({row: sequence.matcher for row, sequence in rows.items()}, words)
        for row, sequence in rows.items():
            if num_required[row] > 0:
                _forbid(words[row], sequence.sampling.stop_token_ids)
        errors = {slot: self._failures[slot] for slot in slots.tolist() if slot in self._failures}
        errors |= {int(slots[row]): error for row, sequence in rows.items() if (error := sequence.matcher.error)}
        return Masks(on_host, errors)

    def expect(self, slots: Sequence[int], step: SampledTokens) -> None:
        """Take the tokens of `slots` from a step that samples one for each, when they are needed."""
        self._see_pending()
        followed = [(self._sequences[slot], index) for index, slot in enumerate(slots) if slot in self._sequences]
        self._pending = (step, followed) if followed else None

    def _see_pending(self) -> None:
        if self._pending is None:
            return
        (step, followed), self._pending = self._pending, None
        tokens = step.sampled_tokens()
        for sequence, index in followed:
            sequence.matcher.see(tokens[index])

    def _start(self, slot: int, sampling: Sampling, output: Sequence[int]) -> None:
        try:
            self._sequences[slot] = _Sequence(sampling, self._matchers.start(sampling.grammar, output))
        except QuireError as error:
            self._failures[slot] = str(error)

    def _fork(self, parent: int, child: int) -> None:
        self._see_pending()
        if parent in self._sequences:
            sampling, matcher = self._sequences[parent]
            self._start(child, sampling, matcher.output)
        elif parent in self._failures:
            self._failures[child] = self._failures[parent]

    def _drop(self, slot: int) -> None:
        self._sequences.pop(slot, None)
        self._failures.pop(slot, None)


def _forbid(words: Words, tokens: Sequence[int]) -> None:
    """Take `tokens` from a mask, unless nothing else is in it."""
    bits = words.view(np.uint32).copy()
    for token in tokens:
        if token < len(bits) * WORD:
            bits[token // WORD] &= ~np.uint32(1 << token % WORD)
    if bits.any():
        words[:] = bits.view(np.int32)

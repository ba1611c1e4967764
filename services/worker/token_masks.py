"""`TokenMasks`: which tokens running sequences may sample, by their grammars, `allowed_tokens`, `bad_words` and limits
of reasoning.

A mask has a bit for each token. What it allows is a function of the sequence's output: a matcher follows a grammar, a
bad word is ruled out where its beginning is the end of the output, and reasoning that has reached its limit can only
end. So the output's last token has to be seen before the next mask is known. On a GPU that token is known on the host
only when its step is done, so `masks` waits for it, while the device computes the next forward pass; it waits for no
sequence whose mask stays the same. If a sequence comes back after a preemption or from another worker, it starts from
its output so far.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.matchers import WORD, GrammarMatchers, Matcher
from services.worker.sequence_states import Ints, is_masked
from shared.errors import QuireError
from shared.protocol import NOTHING_LEFT, ReasoningLimit, Sampling, StepPlan, unpack_tokens
from shared.text.grammars import GrammarCompiler

Words = npt.NDArray[np.uint32]


class SampledTokens(Protocol):
    """A step that was launched."""

    def sampled_tokens(self) -> Sequence[int]:
        """Wait for the step. Return its tokens, one for each that was sampled."""


class Masks(NamedTuple):
    """The tokens that some sequences may sample, and why a sequence cannot go on."""

    words: Tensor  # (M, V / 32) int32 on the host
    errors: dict[int, str]  # by slot


class _Sequence:
    """A running sequence that may not sample every token."""

    def __init__(self, sampling: Sampling, output: Sequence[int], num_words: int, matcher: Matcher | None) -> None:
        """`output` are the tokens so far, which `matcher` has seen. There is one if there is a grammar."""
        self.sampling = sampling
        self.output = matcher.output if matcher is not None else list(output)  # that has been seen
        self.matcher = matcher
        self._allowed: Words | None = None  # less the bad words of one token; None: only the grammar limits them
        if sampling.allowed_tokens or sampling.bad_words:
            self._allowed = _as_words(sampling.allowed_tokens, num_words)
            _take(self._allowed, [word[0] for word in sampling.bad_words if len(word) == 1])
        self._bad_ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # last tokens by those before
        for word in sampling.bad_words:
            if len(word) > 1:
                self._bad_ends[tuple(word[:-1])].append(word[-1])
        self._lengths = {len(begin) for begin in self._bad_ends}
        limit = sampling.reasoning_limit
        self._reasoning = None if limit is None else _Reasoning(limit, self.output)

    @property
    def follows(self) -> bool:
        """Whether its mask depends on its output."""
        return self.matcher is not None or bool(self._bad_ends) or self._reasoning is not None

    def see(self, token: int) -> None:
        """Follow its output by one token."""
        if self._reasoning is not None:
            self._reasoning.see(token)
        if self.matcher is not None:
            self.matcher.see(token)
        else:
            self.output.append(token)

    def restrict(self, words: Words) -> bool:
        """Take from a mask all but the end of reasoning that is due now, unless a grammar rules that out; or else what
        `allowed_tokens` and `bad_words` rule out now. Return whether anything is left.
        """
        if self._reasoning is not None and self._reasoning.is_due and _keep(words, self._reasoning.end):
            return True
        if self._allowed is None:
            return True
        words &= self._allowed
        ends = (self._bad_ends.get(tuple(self.output[-length:]), ()) for length in self._lengths)
        _take(words, list(itertools.chain.from_iterable(ends)))
        return bool(words.any())


class _Reasoning:
    """Counts an output's tokens of reasoning, up to a limit."""

    def __init__(self, limit: ReasoningLimit, output: Sequence[int]) -> None:
        """`output` are the tokens so far."""
        self._limit = limit
        self.end = limit.ends[0]
        self._num_tokens = 0 if limit.is_open else -1  # since its beginning; -1: the output is not inside reasoning
        for token in output:
            self.see(token)

    def see(self, token: int) -> None:
        if token in self._limit.begins:
            self._num_tokens = 0
        elif token in self._limit.ends:
            self._num_tokens = -1
        elif self._num_tokens >= 0:
            self._num_tokens += 1

    @property
    def is_due(self) -> bool:
        """Whether reasoning has reached its limit, so that only its end may be sampled."""
        return self._num_tokens >= self._limit.max_tokens


class TokenMasks:
    """The masks of sequences by slot, for a model with `vocab_size` logits a position.

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
        for slot in [*self._sequences, *self._failures]:
            self._drop(slot)
        self._pending = None

    def update(self, plan: StepPlan) -> None:
        """Follow the sequences that `plan` adds and forks, and no more those that it releases."""
        for slot in plan.released_slots:
            self._drop(slot)
        for new in plan.new_sequences:
            self._drop(new.slot)
            if is_masked(new.sampling):
                self._start(new.slot, new.sampling, unpack_tokens(new.tokens)[new.prompt_len :].tolist())
        for fork in plan.forks:
            for child, _ in fork.children:
                self._drop(child)
                self._fork(fork.parent, child)

    def masks(self, slots: Ints, num_required: Ints) -> Masks:
        """Return the masks of `slots` (M,), which are masked. `num_required` (M,) are output tokens that must come
        before an end, unless nothing else may come.
        """
        rows = {row: self._sequences[slot] for row, slot in enumerate(slots.tolist()) if slot in self._sequences}
        if any(sequence.follows for sequence in rows.values()):
            self._see_pending()
        on_host = torch.full((len(slots), self._num_words), -1, dtype=torch.int32, pin_memory=self._pin_memory)
        words = on_host.numpy()
        self._matchers.fill({row: one.matcher for row, one in rows.items() if one.matcher is not None}, words)
        errors = {slot: self._failures[slot] for slot in slots.tolist() if slot in self._failures}
        for row, sequence in rows.items():
            if error := _restrict(words[row].view(np.uint32), sequence, num_required[row] > 0):
                errors[int(slots[row])] = error
        return Masks(on_host, errors)

    def expect(self, slots: Sequence[int], step: SampledTokens) -> None:
        """Take the tokens of `slots` from a step that samples one for each, when they are needed."""
        self._see_pending()
        sequences = ((self._sequences.get(slot), index) for index, slot in enumerate(slots))
        followed = [(one, index) for one, index in sequences if one is not None and one.follows]
        self._pending = (step, followed) if followed else None

    def _see_pending(self) -> None:
        if self._pending is None:
            return
        (step, followed), self._pending = self._pending, None
        tokens = step.sampled_tokens()
        for sequence, index in followed:
            sequence.see(tokens[index])

    def _start(self, slot: int, sampling: Sampling, output: Sequence[int]) -> None:
        try:
            matcher = self._matchers.start(sampling.grammar, output) if sampling.grammar else None
        except QuireError as error:
            self._failures[slot] = str(error)
            return
        self._sequences[slot] = _Sequence(sampling, output, self._num_words, matcher)

    def _fork(self, parent: int, child: int) -> None:
        self._see_pending()
        if parent in self._sequences:
            self._start(child, self._sequences[parent].sampling, self._sequences[parent].output)
        elif parent in self._failures:
            self._failures[child] = self._failures[parent]

    def _drop(self, slot: int) -> None:
        sequence = self._sequences.pop(slot, None)
        if sequence is not None and sequence.matcher is not None:
            self._matchers.drop(sequence.matcher)
        self._failures.pop(slot, None)


def _restrict(words: Words, sequence: _Sequence, must_go_on: bool) -> str:
    """Take from a mask what does not come from a grammar. Return why the sequence cannot go on; empty if it can."""
    if sequence.matcher is not None and sequence.matcher.error:
        return sequence.matcher.error
    if not sequence.restrict(words):
        words[:] = 2**WORD - 1  # a token is sampled all the same, and does not count
        return NOTHING_LEFT
    if must_go_on:
        rest = words.copy()
        _take(rest, sequence.sampling.stop_token_ids)
        if rest.any():
            words[:] = rest
    return ""


def _keep(words: Words, token: int) -> bool:
    """Leave only `token` in a mask, if it is there. Return whether it is."""
    index, bit = divmod(token, WORD)
    word = words[index] & np.uint32(1 << bit)
    if word:
        words[:] = 0
        words[index] = word
    return bool(word)


def _as_words(tokens: bytes, num_words: int) -> Words:
    """Return a `TokenSet` as a mask; an empty one allows all."""
    if not tokens:
        return np.full(num_words, 2**WORD - 1, np.uint32)
    size = num_words * WORD // 8
    return np.frombuffer(tokens[:size].ljust(size, b"\0"), "<u4").astype(np.uint32)


def _take(words: Words, tokens: Sequence[int]) -> None:
    """Take `tokens` from a mask."""
    if not tokens:
        return
    ids = np.array(tokens, np.int64)
    ids = ids[ids < len(words) * WORD]
    np.bitwise_and.at(words, ids // WORD, ~np.left_shift(np.uint32(1), (ids % WORD).astype(np.uint32)))

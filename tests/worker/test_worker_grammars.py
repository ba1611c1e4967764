"""Tests the matchers of running sequences: what they allow, forks, resumed outputs, errors, when tokens are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from services.worker.grammars import Masks, SequenceGrammars
from shared.errors import ModelError
from shared.protocol import Epoch, Fork, NewSequence, Sampling, StepPlan, pack_tokens
from shared.structured_outputs import StructuredOutputsParams
from shared.text.grammars import GrammarCompiler, grammar_text
from tests.text.vocabulary import make_tokenizer

TOKENIZER = make_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER)
(EOS,) = TOKENIZER.eos_token_ids
(A,) = TOKENIZER.encode("a")  # a stop token of all sequences
VOCAB = TOKENIZER.vocab_size + 70  # padded, as the vocabularies of models are
EPOCH = Epoch("test", 1)


class Step:
    """A step whose tokens are known, and which counts how often they are read."""

    def __init__(self, *texts: str) -> None:
        self.tokens = [EOS if text == "end" else TOKENIZER.encode(text)[0] for text in texts]
        self.reads = 0

    def sampled_tokens(self) -> Sequence[int]:
        self.reads += 1
        return self.tokens


@pytest.fixture
def running() -> SequenceGrammars:
    return SequenceGrammars(lambda: COMPILER, VOCAB, 1)


def regex(expression: str) -> str:
    return grammar_text(StructuredOutputsParams(regex=expression))


def enter(running: SequenceGrammars, slot: int, expression: str = "", output: str = "") -> None:
    prompt = [5, 6, 7]
    sampling = Sampling(max_tokens=9, seed=0, stop_token_ids=[EOS, A], grammar=regex(expression) if expression else "")
    tokens = pack_tokens(prompt + TOKENIZER.encode(output))
    running.update(plan(new_sequences=[NewSequence(slot, tokens, len(prompt), [], sampling, 0)]))


def plan(**changes: Any) -> StepPlan:
    return StepPlan(EPOCH, 0, [], **changes)


def masks(running: SequenceGrammars, *slots: int, required: Sequence[int] | None = None) -> Masks:
    count = len(slots)
    return running.masks(np.array(slots), np.array(required) if required else np.zeros(count, np.int64))


def allowed(running: SequenceGrammars, slot: int, required: int = 0) -> str:
    """Return the characters that may come next in a slot, and "." if it may end."""
    words = masks(running, slot, required=[required]).words.numpy()
    assert words.shape == (1, -(-VOCAB // 32))
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return "".join(sorted("." if id == EOS else TOKENIZER.decode([id]) for id in ids))


def test_a_sequence_is_followed_token_by_token(running: SequenceGrammars) -> None:
    enter(running, 3, "ab?")
    assert allowed(running, 3) == "a"
    running.expect([9, 3], Step("x", "a"))
    assert allowed(running, 3) == ".b"
    running.expect([3], Step("b"))
    assert allowed(running, 3) == "."
    running.expect([3], Step("end"))
    running.expect([3], Step("end"))  # of a step that was planned before the end was known
    assert masks(running, 3).errors == {}


def test_tokens_are_read_when_they_are_needed_and_once(running: SequenceGrammars) -> None:
    enter(running, 0, "ab")
    enter(running, 1)
    step, other = Step("x", "a"), Step("x")
    running.expect([1, 0], step)
    assert step.reads == 0
    assert allowed(running, 0) == allowed(running, 0) == "b"
    assert step.reads == 1
    running.expect([1], other)  # has no sequence with a grammar
    assert allowed(running, 0) == "b"
    assert other.reads == 0


def test_steps_are_read_in_their_order(running: SequenceGrammars) -> None:
    enter(running, 0, "ab[cd]")
    running.expect([0], Step("a"))
    running.expect([0], Step("b"))
    assert allowed(running, 0) == "cd"


def test_a_resumed_output_goes_on_where_it_was(running: SequenceGrammars) -> None:
    enter(running, 0, "one two[ab]", "one two")
    assert allowed(running, 0) == "ab"
    running.update(plan(released_slots=[0]))
    enter(running, 0, "x")
    assert allowed(running, 0) == "x"


def test_children_go_on_by_themselves(running: SequenceGrammars) -> None:
    enter(running, 0, "a[bc][de]")
    running.expect([0], Step("a"))
    running.update(plan(forks=[Fork(0, [(1, 1), (2, 2)])]))
    running.expect([0, 1, 2], Step("b", "c", "x"))
    assert allowed(running, 0) == allowed(running, 1) == "de"
    assert list(masks(running, 0, 1, 2).errors) == [2]


def test_an_end_waits_for_min_tokens_if_anything_else_may_come(running: SequenceGrammars) -> None:
    """GDD-05: what is whole ends, and does not wait for more tokens than there can be."""
    enter(running, 0, "ab?")
    running.expect([0], Step("a"))
    assert allowed(running, 0, required=5) == "b"
    running.expect([0], Step("b"))
    assert allowed(running, 0, required=4) == "."
    enter(running, 1, "[abc]")
    assert allowed(running, 1, required=1) == "bc"
    assert allowed(running, 1) == "abc"


def test_an_output_that_exceeds_a_limit_ends_alone(running: SequenceGrammars) -> None:
    """The library's caches have limits, which sequences with the same grammar must not share."""
    expensive = r"x(\w{1,300}|[a-z0-9]{0,700}b){1,100}"
    for slot in (0, 1):
        enter(running, slot, expensive)
    running.expect([0, 1], Step("x", "x"))
    for _ in range(300):
        if masks(running, 0).errors:
            break
        running.expect([0], Step("a"))
    assert list(masks(running, 0, 1).errors) == [0]
    enter(running, 2, expensive)
    assert not masks(running, 1, 2).errors


def test_a_token_that_is_not_allowed_ends_the_sequence(running: SequenceGrammars) -> None:
    """GDD-07."""
    enter(running, 0, "ab")
    enter(running, 1, "ab")
    running.expect([0, 1], Step("x", "a"))
    result = masks(running, 0, 1)
    assert list(result.errors) == [0]
    assert "cannot be followed" in result.errors[0]
    assert allowed(running, 1) == "b"


def test_only_padding_is_not_allowed_by_any_text(running: SequenceGrammars) -> None:
    enter(running, 0, "(.|\n)*")
    words = masks(running, 0).words.numpy()
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert ids.max() < TOKENIZER.vocab_size
    assert len(ids) > 200


def test_without_a_compiler_a_sequence_ends_with_the_reason() -> None:
    def fail() -> GrammarCompiler:
        raise ModelError("no tokenizer here")

    running = SequenceGrammars(fail, VOCAB, 1)
    enter(running, 0, "a")
    running.update(plan(forks=[Fork(0, [(1, 1)])]))
    assert masks(running, 0, 1).errors == dict.fromkeys((0, 1), "no tokenizer here")
    running.update(plan(released_slots=[0, 1]))
    enter(running, 2)
    running.clear()

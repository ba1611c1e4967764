"""Tests the masks of running sequences: what they allow, forks, resumed outputs, errors, when tokens are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from services.worker.token_masks import Masks, TokenMasks
from shared.errors import ModelError
from shared.protocol import (
    Epoch,
    Fork,
    NewSequence,
    ReasoningLimit,
    Sampling,
    StepPlan,
    pack_token_set,
    pack_tokens,
)
from shared.structured_outputs import StructuredOutputsParams
from shared.text.grammars import GrammarCompiler, grammar_text
from tests.text.vocabulary import make_tokenizer
from tests.worker.held_compiler import HeldCompiler

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
def running() -> TokenMasks:
    return TokenMasks(lambda: COMPILER, VOCAB, 1)


def regex(expression: str) -> str:
    return grammar_text(StructuredOutputsParams(regex=expression))


def thinking(max_tokens: int, *, is_open: bool = False) -> ReasoningLimit:
    """Return a limit of reasoning, which is between "(" and ")", or "]"."""
    begin, end, other = (TOKENIZER.encode(one)[0] for one in "()]")
    return ReasoningLimit(max_tokens, [begin], [end, other], is_open)


def enter(
    running: TokenMasks,
    slot: int,
    expression: str = "",
    output: str = "",
    allowed: str = "",
    bad: Sequence[str] = (),
    reasoning: ReasoningLimit | None = None,
) -> None:
    """Let a sequence enter a slot: `allowed` are its allowed tokens, "." for the end, and `bad` its bad words."""
    prompt = [5, 6, 7]
    sampling = Sampling(
        max_tokens=9,
        seed=0,
        stop_token_ids=[EOS, A],
        grammar=regex(expression) if expression else "",
        allowed_tokens=pack_token_set([EOS if one == "." else TOKENIZER.encode(one)[0] for one in allowed]),
        bad_words=[TOKENIZER.encode(word) for word in bad],
        reasoning_limit=reasoning,
    )
    tokens = pack_tokens(prompt + TOKENIZER.encode(output))
    running.update(plan(new_sequences=[NewSequence(slot, tokens, len(prompt), [], sampling, 0)]))


def plan(**changes: Any) -> StepPlan:
    return StepPlan(EPOCH, 0, [], **changes)


def masks(running: TokenMasks, *slots: int, required: Sequence[int] | None = None) -> Masks:
    count = len(slots)
    return running.masks(np.array(slots), np.array(required) if required else np.zeros(count, np.int64))


def allowed(running: TokenMasks, slot: int, required: int = 0) -> str:
    """Return the characters that may come next in a slot, and "." if it may end."""
    words = masks(running, slot, required=[required]).words.numpy()
    assert words.shape == (1, -(-VOCAB // 32))
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return "".join(sorted("." if id == EOS else TOKENIZER.decode([id]) for id in ids))


def test_a_sequence_is_followed_token_by_token(running: TokenMasks) -> None:
    enter(running, 3, "ab?")
    assert allowed(running, 3) == "a"
    running.expect([9, 3], Step("x", "a"))
    assert allowed(running, 3) == ".b"
    running.expect([3], Step("b"))
    assert allowed(running, 3) == "."
    running.expect([3], Step("end"))
    running.expect([3], Step("end"))  # of a step that was planned before the end was known
    assert masks(running, 3).errors == {}


def test_tokens_are_read_when_they_are_needed_and_once(running: TokenMasks) -> None:
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


def test_steps_are_read_in_their_order(running: TokenMasks) -> None:
    enter(running, 0, "ab[cd]")
    running.expect([0], Step("a"))
    running.expect([0], Step("b"))
    assert allowed(running, 0) == "cd"


def test_a_resumed_output_goes_on_where_it_was(running: TokenMasks) -> None:
    enter(running, 0, "one two[ab]", "one two")
    assert allowed(running, 0) == "ab"
    running.update(plan(released_slots=[0]))
    enter(running, 0, "x")
    assert allowed(running, 0) == "x"


def test_children_go_on_by_themselves(running: TokenMasks) -> None:
    enter(running, 0, "a[bc][de]")
    running.expect([0], Step("a"))
    running.update(plan(forks=[Fork(0, [(1, 1), (2, 2)])]))
    running.expect([0, 1, 2], Step("b", "c", "x"))
    assert allowed(running, 0) == allowed(running, 1) == "de"
    assert list(masks(running, 0, 1, 2).errors) == [2]


def test_an_end_waits_for_min_tokens_if_anything_else_may_come(running: TokenMasks) -> None:
    """GDD-05: what is whole ends, and does not wait for more tokens than there can be."""
    enter(running, 0, "ab?")
    running.expect([0], Step("a"))
    assert allowed(running, 0, required=5) == "b"
    running.expect([0], Step("b"))
    assert allowed(running, 0, required=4) == "."
    enter(running, 1, "[abc]")
    assert allowed(running, 1, required=1) == "bc"
    assert allowed(running, 1) == "abc"


def test_an_output_that_exceeds_a_limit_ends_alone(running: TokenMasks) -> None:
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


def test_a_token_that_is_not_allowed_ends_the_sequence(running: TokenMasks) -> None:
    """GDD-07."""
    enter(running, 0, "ab")
    enter(running, 1, "ab")
    running.expect([0, 1], Step("x", "a"))
    result = masks(running, 0, 1)
    assert list(result.errors) == [0]
    assert "cannot be followed" in result.errors[0]
    assert allowed(running, 1) == "b"


def test_only_padding_is_not_allowed_by_any_text(running: TokenMasks) -> None:
    enter(running, 0, "(.|\n)*")
    words = masks(running, 0).words.numpy()
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert ids.max() < TOKENIZER.vocab_size
    assert len(ids) > 200


def test_without_a_compiler_a_sequence_ends_with_the_reason() -> None:
    def fail() -> GrammarCompiler:
        raise ModelError("no tokenizer here")

    running = TokenMasks(fail, VOCAB, 1)
    enter(running, 0, "a")
    running.update(plan(forks=[Fork(0, [(1, 1)])]))
    assert masks(running, 0, 1).errors == dict.fromkeys((0, 1), "no tokenizer here")
    running.update(plan(released_slots=[0, 1]))
    enter(running, 2)
    running.clear()


def test_only_a_mask_waits_for_a_new_grammar() -> None:
    """Neither the plan that brings it nor the masks of others wait, nor does a sequence that leaves or comes back."""
    compiler = HeldCompiler(TOKENIZER)
    running = TokenMasks(lambda: compiler, VOCAB, 1)
    for slot, expression, output in ((0, "ab", ""), (1, "cd", ""), (2, "ef", "e"), (3, "gh", "")):
        enter(running, slot, expression, output)
    enter(running, 4, bad=["x"])
    assert missing(running, 4) == "x"
    assert compiler.begun.acquire(timeout=60)
    running.update(plan(released_slots=[1]))
    enter(running, 3, "ij")
    compiler.may_go_on.set()
    assert [allowed(running, slot) for slot in (2, 0, 3)] == ["f", "a", "i"]
    assert compiler.compiled == [regex(expression) for expression in ("ab", "ef", "ij")]


def test_all_are_forgotten_while_their_grammars_are_compiled() -> None:
    compiler = HeldCompiler(TOKENIZER)
    running = TokenMasks(lambda: compiler, VOCAB, 1)
    for slot, expression in enumerate(("ab", "cd", "cd")):
        enter(running, slot, expression)
    assert compiler.begun.acquire(timeout=60)
    running.clear()
    enter(running, 0, "ef")
    compiler.may_go_on.set()
    assert allowed(running, 0) == "e"
    assert compiler.compiled == [regex(expression) for expression in ("ab", "ef")]


def missing(running: TokenMasks, slot: int) -> str:
    """Return the characters that may not come next in a slot without allowed tokens, and "." if it may not end."""
    words = masks(running, slot).words.numpy()
    ids = np.flatnonzero(~np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)).tolist()
    return "".join(sorted("." if id == EOS else TOKENIZER.decode([id]) for id in ids))


def test_only_allowed_tokens_may_come_and_an_end_only_if_it_is_one(running: TokenMasks) -> None:
    enter(running, 0, allowed="bc")
    enter(running, 1, allowed="b.")
    assert (allowed(running, 0), allowed(running, 1)) == ("bc", ".b")
    running.expect([0, 1], Step("b", "b"))
    assert (allowed(running, 0), allowed(running, 1)) == ("bc", ".b")


def test_zeros_behind_the_last_token_of_a_set_mean_nothing(running: TokenMasks) -> None:
    """The scheduler lets them through, since no token is beyond the vocabulary."""
    sampling = Sampling(max_tokens=9, seed=0, allowed_tokens=pack_token_set([A]) + bytes(VOCAB))
    running.update(plan(new_sequences=[NewSequence(0, pack_tokens([5]), 1, [], sampling, 0)]))
    assert allowed(running, 0) == "a"


def test_what_allowed_tokens_leave_of_a_grammar_may_be_nothing(running: TokenMasks) -> None:
    """An end is no exception, as it is none without a grammar."""
    enter(running, 0, "b", allowed="bc")
    assert allowed(running, 0) == "b"
    running.expect([0], Step("b"))
    (error,) = masks(running, 0).errors.values()
    assert "allowed_token_ids, bad_words and the output's grammar" in error


def test_a_bad_word_of_one_token_never_comes(running: TokenMasks) -> None:
    enter(running, 0, bad=["b", "d"])
    assert missing(running, 0) == "bd"
    running.expect([0], Step("x"))
    assert missing(running, 0) == "bd"


def test_a_longer_one_lacks_its_last_token_where_the_output_ends_with_the_rest(running: TokenMasks) -> None:
    enter(running, 0, bad=["xyz", "yw", "z"])
    seen = []
    for text in "yxyzxxyy":
        running.expect([0], Step(text))
        seen.append(missing(running, 0))
    assert seen == ["wz", "z", "wz", "z", "z", "z", "wz", "wz"]
    enter(running, 1, bad=["xyz", "xyv"])
    assert missing(running, 1) == ""
    for text in "xxy":
        running.expect([1], Step(text))
    assert missing(running, 1) == "vz"


def test_the_prompt_is_no_part_of_the_output(running: TokenMasks) -> None:
    last = TOKENIZER.decode([7])
    enter(running, 0, bad=[f"{last}b"])
    assert missing(running, 0) == ""
    running.expect([0], Step(last))
    assert missing(running, 0) == "b"


def test_a_word_that_was_begun_before_a_preemption_is_known(running: TokenMasks) -> None:
    enter(running, 0, bad=["xyz"], output="bxy")
    assert missing(running, 0) == "z"
    running.update(plan(released_slots=[0]))
    enter(running, 0, bad=["xyz"], output="bx")
    assert missing(running, 0) == ""


def test_children_of_a_fork_have_bad_words_of_their_own(running: TokenMasks) -> None:
    enter(running, 0, bad=["xy", "b"], allowed="bxyz")
    running.update(plan(forks=[Fork(0, [(1, 1)])]))
    running.expect([0, 1], Step("x", "z"))
    assert (allowed(running, 0), allowed(running, 1)) == ("xz", "xyz")


def test_masks_are_of_all_reasons_together(running: TokenMasks) -> None:
    enter(running, 0, "[bcd]{4}", allowed="bc.", bad=["bc"])
    assert allowed(running, 0) == "bc"
    running.expect([0], Step("b"))
    assert allowed(running, 0) == "b"
    enter(running, 1, "b[cd]", output="b")
    assert allowed(running, 1) == "cd"


def test_stop_tokens_wait_for_min_tokens_if_anything_else_is_allowed(running: TokenMasks) -> None:
    enter(running, 0, allowed="abc.")
    assert (allowed(running, 0, required=1), allowed(running, 0)) == ("bc", ".abc")
    enter(running, 1, allowed="a.")
    assert allowed(running, 1, required=1) == ".a"
    enter(running, 2, bad=["b"])
    assert A not in _ids(masks(running, 2, required=[1]))
    assert A in _ids(masks(running, 2))


def _ids(masks: Masks) -> list[int]:
    return np.flatnonzero(np.unpackbits(masks.words.numpy().view(np.uint8), bitorder="little")).tolist()


def test_a_sequence_of_which_bad_words_leave_nothing_ends_alone(running: TokenMasks) -> None:
    enter(running, 0, "xyz", bad=["yz"])
    enter(running, 1, allowed="xy", bad=["xx", "xy"])
    running.expect([0, 1], Step("x", "y"))
    assert masks(running, 0, 1).errors == {}
    running.expect([0, 1], Step("y", "x"))
    result = masks(running, 0, 1)
    assert list(result.errors) == [0, 1]
    assert all("bad_words" in error for error in result.errors.values())
    assert result.words.numpy().all(), "the sampler needs some token"


def test_what_depends_on_no_token_waits_for_none(running: TokenMasks) -> None:
    enter(running, 0, allowed="bc", bad=["b"])
    enter(running, 1, bad=["xy"])
    step, other = Step("b", "x"), Step("b")
    running.expect([0, 1], step)
    assert allowed(running, 0) == "c"
    assert step.reads == 0
    assert missing(running, 1) == "y"
    assert step.reads == 1
    running.expect([0], other)
    assert missing(running, 1) == "y"
    assert other.reads == 0


def follow(running: TokenMasks, slot: int, text: str) -> str:
    """Let an output go on by single tokens. Return "!" for each before which only the end of reasoning could come, and
    for the one behind them, and "-" for others.
    """
    marks = ""
    for token in [*text, ""]:
        marks += "!" if allowed(running, slot) == ")" else "-"
        if token:
            running.expect([slot], Step(token))
    return marks


def test_reasoning_that_reaches_its_limit_can_only_end(running: TokenMasks) -> None:
    enter(running, 0, reasoning=thinking(2))
    assert follow(running, 0, "xx(xy)yyy") == "-----!----"
    enter(running, 1, reasoning=thinking(2, is_open=True))
    assert follow(running, 1, "xy)yyy") == "--!----"
    enter(running, 2, reasoning=thinking(0, is_open=True))
    assert follow(running, 2, ")y()y") == "!--!--"


def test_reasoning_may_end_before_its_limit_and_each_has_its_own(running: TokenMasks) -> None:
    enter(running, 0, reasoning=thinking(2))
    assert follow(running, 0, "(x)x(x]x(xx") == "-----------!"


def test_reasoning_is_counted_on_after_a_preemption_and_in_children(running: TokenMasks) -> None:
    enter(running, 0, reasoning=thinking(3), output="x(xy")
    assert follow(running, 0, "z") == "-!"
    running.update(plan(forks=[Fork(0, [(1, 1)])]))
    running.expect([0, 1], Step(")", "y"))
    assert allowed(running, 0) != ")"
    assert allowed(running, 1) == ")", "until it comes"
    running.update(plan(released_slots=[0]))
    enter(running, 0, reasoning=thinking(1, is_open=True), output="x")
    assert allowed(running, 0) == ")"


def test_the_end_of_reasoning_comes_though_other_tokens_are_asked_for(running: TokenMasks) -> None:
    """Bad words and allowed tokens are about the answer, and min_tokens about its end."""
    enter(running, 0, allowed="xy", bad=[")"], reasoning=thinking(1, is_open=True))
    assert follow(running, 0, "x)") == "-!-"
    assert allowed(running, 0) == "xy"
    end = ReasoningLimit(0, [5], [A], is_open=True)
    enter(running, 1, reasoning=end)
    assert allowed(running, 1, required=3) == "a"


def test_a_grammar_is_followed_though_reasoning_is_too_long(running: TokenMasks) -> None:
    """A chat's grammar lets reasoning end anywhere. Another one has no reasoning in it."""
    enter(running, 0, "x*[)]yy", reasoning=thinking(2, is_open=True))
    assert follow(running, 0, "xx)yy") == "--!---"
    enter(running, 1, "xx", reasoning=thinking(0, is_open=True))
    assert allowed(running, 1) == "x"


def test_a_limit_waits_for_each_token(running: TokenMasks) -> None:
    enter(running, 0, reasoning=thinking(5))
    step = Step("(")
    running.expect([0], step)
    assert masks(running, 0).errors == {}
    assert step.reads == 1

"""Tests that matchers share what is compiled, that they are independent, what happens if a shared lexer is lost, and
what waits for a compiler.
"""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from services.worker import matchers as module
from services.worker.matchers import GrammarMatchers, Matcher
from shared.errors import ModelError
from shared.structured_outputs import StructuredOutputsParams
from shared.text.grammars import GrammarCompiler, grammar_text
from tests.text.vocabulary import make_tokenizer
from tests.worker.held_compiler import HeldCompiler

TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.vocab_size
EXPENSIVE = r"x(\w{1,300}|[a-z0-9]{0,700}b){1,100}"
"""An expression that exceeds a limit some tokens behind the x."""


@pytest.fixture(scope="module")
def loaded() -> HeldCompiler:
    return HeldCompiler(TOKENIZER)


@pytest.fixture
def compiler(loaded: HeldCompiler) -> Iterator[HeldCompiler]:
    loaded.compiled, loaded.begun = [], threading.Semaphore(0)
    loaded.may_go_on.set()
    yield loaded
    loaded.may_go_on.set()


def make(compiler: GrammarCompiler, vocab_size: int = VOCAB, num_threads: int = 2) -> GrammarMatchers:
    return GrammarMatchers(lambda: compiler, vocab_size, num_threads)


def regex(expression: str) -> str:
    return grammar_text(StructuredOutputsParams(regex=expression))


def see(matcher: Matcher, text: str) -> None:
    for token in TOKENIZER.encode(text):
        matcher.see(token)


def allowed(matchers: GrammarMatchers, each: Sequence[Matcher], vocab_size: int = VOCAB) -> list[str]:
    """Return the characters that each may have next."""
    words = np.full((len(each) + 1, -(-vocab_size // 32)), 7, np.int32)
    matchers.fill(dict(enumerate(each)), words)
    assert (words[-1] == 7).all(), "a row without a matcher stays as it is"
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[: len(each)]
    return ["".join(sorted(TOKENIZER.decode([id]) for id in np.flatnonzero(row).tolist())) for row in bits]


@pytest.mark.parametrize(("num_threads", "compiled"), [(1, 1), (3, 3), (64, module.MAX_LEXERS)])
def test_a_grammar_is_compiled_for_a_few_threads(
    compiler: HeldCompiler, monkeypatch: pytest.MonkeyPatch, num_threads: int, compiled: int
) -> None:
    monkeypatch.setattr(module, "QUICK_SECONDS", 60.0)
    matchers = make(compiler, num_threads=num_threads)
    each = [matchers.start(regex("[ab]c|[de]f")) for _ in range(9)]
    for at, matcher in enumerate(each):
        see(matcher, "ad"[at % 2])
    assert allowed(matchers, each) == ["cf"[at % 2] for at in range(9)]
    assert len(compiler.compiled) == compiled
    assert {matcher.lexer_index for matcher in each} == set(range(compiled))


def test_a_grammar_that_takes_long_is_compiled_once(compiler: HeldCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one request for many samples does not hold up the streams of others."""
    monkeypatch.setattr(module, "QUICK_SECONDS", 0.0)
    matchers = make(compiler, num_threads=4)
    each = [matchers.start(regex("a")) for _ in range(64)]
    assert allowed(matchers, each) == ["a"] * 64
    assert {matcher.lexer_index for matcher in each} == {0}
    assert allowed(matchers, [matchers.start(regex("a")) for _ in range(64)]) == ["a"] * 64
    assert len(compiler.compiled) == 1


def test_few_grammars_are_kept(compiler: HeldCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAMMARS", 2)
    matchers = make(compiler, num_threads=1)
    each = [matchers.start(regex(expression)) for expression in ("a", "b", "a", "c", "a")]
    assert allowed(matchers, each) == ["a", "b", "a", "c", "a"]
    assert len(compiler.compiled) == 3
    assert allowed(matchers, [matchers.start(regex("b"))]) == ["b"]
    assert len(compiler.compiled) == 4


def test_grammars_that_nothing_compiles_are_not_kept() -> None:
    def fail() -> GrammarCompiler:
        raise ModelError("no tokenizer here")

    matchers = GrammarMatchers(fail, VOCAB, 1)
    for expression in "ab":
        with pytest.raises(ModelError):
            matchers.start(regex(expression))
    assert len(matchers._grammars) == 0


def test_an_output_so_far_is_followed(compiler: HeldCompiler) -> None:
    matchers = make(compiler)
    assert allowed(matchers, [matchers.start(regex("abc"), TOKENIZER.encode("ab"))]) == ["c"]


@pytest.mark.parametrize("vocab_size", [VOCAB - 64, VOCAB + 70])
def test_masks_have_the_width_of_the_logits(compiler: HeldCompiler, vocab_size: int) -> None:
    matchers = make(compiler, vocab_size)
    one = allowed(matchers, [matchers.start(regex("(.|\n)*"))], vocab_size)[0]
    assert len(one) > 100


def test_a_lost_lexer_ends_only_the_output_that_lost_it(compiler: HeldCompiler) -> None:
    matchers = make(compiler, num_threads=1)
    each = [matchers.start(regex(EXPENSIVE)) for _ in range(4)]
    for matcher in each:
        see(matcher, "x")
    greedy, *others, late = each
    for _ in range(300):
        allowed(matchers, [greedy])
        if greedy.error:
            break
        see(greedy, "a")
    assert "too" in greedy.error.lower(), greedy.error
    before = len(compiler.compiled)
    assert len(set(allowed(matchers, others))) == 1
    assert [matcher.error for matcher in others] == ["", ""]
    assert len(compiler.compiled) == before + 2, "each has a lexer of its own"
    allowed(matchers, [greedy, *others])
    assert len(compiler.compiled) == before + 2
    assert greedy.error
    see(others[0], "a")
    fresh = [matchers.start(regex(EXPENSIVE), TOKENIZER.encode("xa")) for _ in range(3)]
    texts = allowed(matchers, [others[0], *fresh])
    assert len(set(texts)) == 1
    assert len(compiler.compiled) == before + 3, "new ones share a new lexer"
    allowed(matchers, [late])
    allowed(matchers, [matchers.start(regex(EXPENSIVE))])
    assert len(compiler.compiled) == before + 4, "an output that notices late leaves the newer grammar in place"


def test_a_token_that_is_not_allowed_is_an_error(compiler: HeldCompiler) -> None:
    """GDD-07."""
    matchers = make(compiler)
    one, other = (matchers.start(regex("ab")) for _ in range(2))
    see(one, "x")
    see(other, "a")
    assert allowed(matchers, [one, other])[1] == "b"
    assert "cannot be followed" in one.error
    assert not other.error


def test_others_go_on_while_a_grammar_is_compiled(compiler: HeldCompiler) -> None:
    matchers = make(compiler)
    ready = matchers.start(regex("ab"))
    assert allowed(matchers, [ready]) == ["a"]
    compiler.may_go_on.clear()
    new, resumed = matchers.start(regex("cd")), matchers.start(regex("ef"), TOKENIZER.encode("e"))
    see(ready, "a")
    assert allowed(matchers, [ready]) == ["b"]
    assert new.is_waiting
    assert resumed.is_waiting
    compiler.may_go_on.set()
    assert allowed(matchers, [new, ready, resumed]) == ["c", "b", "f"]


def test_a_grammar_that_nobody_waits_for_is_not_compiled(compiler: HeldCompiler) -> None:
    compiler.may_go_on.clear()
    matchers = make(compiler)
    first, *dropped, last = [matchers.start(regex(expression)) for expression in ("a", "b", "b", "c")]
    assert compiler.begun.acquire(timeout=60)
    matchers.drop(dropped[0])
    matchers.drop(dropped[1])
    assert regex("b") not in matchers._grammars
    compiler.may_go_on.set()
    assert allowed(matchers, [first, last]) == ["a", "c"]
    assert len(compiler.compiled) == 2
    assert allowed(matchers, [matchers.start(regex("b"))]) == ["b"]
    assert len(compiler.compiled) == 3


@pytest.mark.parametrize("quick", [0.0, 60.0])
def test_an_output_that_ends_takes_no_grammar_from_another(
    compiler: HeldCompiler, monkeypatch: pytest.MonkeyPatch, quick: float
) -> None:
    """It may end before, while or after its grammar is compiled."""
    monkeypatch.setattr(module, "QUICK_SECONDS", quick)
    compiler.may_go_on.clear()
    matchers = make(compiler)
    alone, one, other = [matchers.start(regex(expression)) for expression in ("a", "b", "b")]
    assert compiler.begun.acquire(timeout=60)
    matchers.drop(alone)
    matchers.drop(one)
    compiler.may_go_on.set()
    assert allowed(matchers, [other]) == ["b"]
    matchers.drop(other)
    assert len(compiler.compiled) == (3 if quick else 2)
    assert allowed(matchers, [matchers.start(regex(expression)) for expression in "ab"]) == ["a", "b"]
    assert len(compiler.compiled) == (4 if quick else 2), "a quick one gets a second lexer with its second output"

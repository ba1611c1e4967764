"""Tests that matchers share what is compiled, that they are independent, and what happens if a shared lexer is lost."""

from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher

from services.worker import matchers as module
from services.worker.matchers import GrammarMatchers, Matcher
from shared.errors import ModelError
from shared.structured_outputs import StructuredOutputsParams
from shared.text.grammars import GrammarCompiler, grammar_text
from tests.text.vocabulary import make_tokenizer

TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.vocab_size
EXPENSIVE = r"x(\w{1,300}|[a-z0-9]{0,700}b){1,100}"
"""An expression that exceeds a limit some tokens behind the x."""


class Compiler(GrammarCompiler):
    """Counts what it compiles."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.count = 0

    def matcher(self, grammar: str) -> LLMatcher:
        self.count += 1
        return super().matcher(grammar)


@pytest.fixture(scope="module")
def loaded() -> Compiler:
    return Compiler()


@pytest.fixture
def compiler(loaded: Compiler) -> Compiler:
    loaded.count = 0
    return loaded


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
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, num_threads: int, compiled: int
) -> None:
    monkeypatch.setattr(module, "QUICK_SECONDS", 60.0)
    matchers = make(compiler, num_threads=num_threads)
    each = [matchers.start(regex("[ab]c|[de]f")) for _ in range(9)]
    assert compiler.count == compiled
    for at, matcher in enumerate(each):
        see(matcher, "ad"[at % 2])
    assert allowed(matchers, each) == ["cf"[at % 2] for at in range(9)]


def test_a_grammar_that_takes_long_is_compiled_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one request for many samples does not hold up the streams of others."""
    monkeypatch.setattr(module, "QUICK_SECONDS", 0.0)
    matchers = make(compiler, num_threads=4)
    assert allowed(matchers, [matchers.start(regex("a")) for _ in range(64)]) == ["a"] * 64
    assert compiler.count == 1


def test_few_grammars_are_kept(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAMMARS", 2)
    matchers = make(compiler, num_threads=1)
    for expression in ("a", "b", "a", "c", "a"):
        matchers.start(regex(expression))
    assert compiler.count == 3
    old = matchers.start(regex("b"))
    assert compiler.count == 4
    assert allowed(matchers, [old]) == ["b"]


def test_grammars_that_nothing_compiles_are_not_kept() -> None:
    def fail() -> GrammarCompiler:
        raise ModelError("no tokenizer here")

    matchers = GrammarMatchers(fail, VOCAB, 1)
    for expression in "ab":
        with pytest.raises(ModelError):
            matchers.start(regex(expression))
    assert len(matchers._compiled) == 0


def test_an_output_so_far_is_followed(compiler: Compiler) -> None:
    matchers = make(compiler)
    assert allowed(matchers, [matchers.start(regex("abc"), TOKENIZER.encode("ab"))]) == ["c"]


@pytest.mark.parametrize("vocab_size", [VOCAB - 64, VOCAB + 70])
def test_masks_have_the_width_of_the_logits(compiler: Compiler, vocab_size: int) -> None:
    matchers = make(compiler, vocab_size)
    one = allowed(matchers, [matchers.start(regex("(.|\n)*"))], vocab_size)[0]
    assert len(one) > 100


def test_a_lost_lexer_ends_only_the_output_that_lost_it(compiler: Compiler) -> None:
    matchers = make(compiler, num_threads=1)
    each = [matchers.start(regex(EXPENSIVE)) for _ in range(3)]
    for matcher in each:
        see(matcher, "x")
    greedy, *others = each
    for _ in range(300):
        allowed(matchers, [greedy])
        if greedy.error:
            break
        see(greedy, "a")
    assert "too" in greedy.error.lower(), greedy.error
    before = compiler.count
    assert len(set(allowed(matchers, others))) == 1
    assert [matcher.error for matcher in others] == ["", ""]
    assert compiler.count == before + 2, "each has a lexer of its own"
    allowed(matchers, each)
    assert compiler.count == before + 2
    assert greedy.error
    see(others[0], "a")
    fresh = [matchers.start(regex(EXPENSIVE), TOKENIZER.encode("xa")) for _ in range(3)]
    texts = allowed(matchers, [others[0], *fresh])
    assert len(set(texts)) == 1
    assert compiler.count == before + 3, "new ones share a new lexer"


def test_a_token_that_is_not_allowed_is_an_error(compiler: Compiler) -> None:
    """GDD-07."""
    matchers = make(compiler)
    one, other = (matchers.start(regex("ab")) for _ in range(2))
    see(one, "x")
    see(other, "a")
    assert allowed(matchers, [one, other])[1] == "b"
    assert "cannot be followed" in one.error
    assert not other.error

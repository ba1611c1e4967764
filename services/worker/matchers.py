"""`GrammarMatchers`: follows outputs by their grammars, with the library llguidance.

A grammar is compiled once, which takes a millisecond, and up to fifty. Each output gets a copy, which takes ten
microseconds. Copies share the lexer, which finds its states as they are needed: one thread at a time can use it, and if
it exceeds a limit, it is lost to all of them. So a grammar has a lexer for each of a few threads if it compiles
quickly, and an output whose lexer is lost goes on with one of its own. If that fails too, the output has an error.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from shared.text.grammars import GrammarCompiler
from shared.text.lark import first_lines

Words = npt.NDArray[np.int32]

WORD = 32
"""Tokens of a word of a mask."""

MAX_LEXERS = 4
"""Maximum number of lexers of a grammar."""

QUICK_SECONDS = 0.005
"""A grammar that takes longer to compile has one lexer, so that an admission holds up a step by no more than that."""

MAX_GRAMMARS = 64
"""Grammars of which the compiled form is kept."""


class Matcher:
    """Follows one output. `output` are the tokens that it has seen."""

    def __init__(self, grammar: str, lexer: int, shared: LLMatcher, output: Sequence[int]) -> None:
        """`shared` is to be copied, and stands at the beginning."""
        self.grammar = grammar
        self.lexer = lexer  # its index among those of the grammar; -1: of its own
        self.output = list(output)
        self.go_on(shared.deep_copy())

    def go_on(self, matcher: LLMatcher) -> None:
        """Go on with `matcher`, which stands at the beginning."""
        self.matcher = matcher
        if self.output:
            matcher.consume_tokens(self.output)

    def see(self, token: int) -> None:
        """Take the output's next token."""
        if not self.matcher.is_stopped():  # else it has ended, and this step was planned before that
            self.matcher.consume_token(token)
            self.output.append(token)

    @property
    def error(self) -> str:
        """Return why the output cannot go on; empty if it can."""
        if not self.matcher.is_error():
            return ""
        return f"the grammar cannot be followed: {first_lines(self.matcher.get_error())}"


class _Compiled:
    """A grammar's compiled form: a matcher at the beginning for each lexer."""

    def __init__(self) -> None:
        self.matchers: list[LLMatcher] = []
        self.seconds = 0.0  # that compiling took
        self.num_copies = 0


class GrammarMatchers:
    """The grammars of a model with `vocab_size` logits a position. Masks are made by `num_threads` threads.

    `load_compiler` is called when the first output has a grammar. It raises `QuireError` if there is no compiler.
    """

    def __init__(self, load_compiler: Callable[[], GrammarCompiler], vocab_size: int, num_threads: int) -> None:
        self._load_compiler = load_compiler
        self._num_words = -(-vocab_size // WORD)
        self._num_lexers = min(num_threads, MAX_LEXERS)
        self._executor = LLExecutor(num_threads)
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()  # by grammar, the one used last at the end

    def start(self, grammar: str, output: Sequence[int] = ()) -> Matcher:
        """Return a matcher that has seen `output`. Raise `QuireError` if nothing compiles grammars."""
        compiled = self._compiled.get(grammar) or _Compiled()
        if compiled.num_copies < (self._num_lexers if compiled.seconds < QUICK_SECONDS else 1):
            began = time.perf_counter()
            compiled.matchers.append(self._load_compiler().matcher(grammar))
            compiled.seconds = time.perf_counter() - began
        self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        lexer = compiled.num_copies % len(compiled.matchers)
        compiled.num_copies += 1
        return Matcher(grammar, lexer, compiled.matchers[lexer], output)

    def fill(self, matchers: Mapping[int, Matcher], words: Words) -> None:
        """Set rows of `words` (M, V / 32) to what their matchers allow next. A row means nothing if there is an error.

        A matcher whose lexer is lost gets one of its own.
        """
        if not matchers:
            return
        self._fill(matchers, words)
        lost = {row: one for row, one in matchers.items() if one.lexer >= 0 and one.error}
        for matcher in lost.values():
            self._compiled.pop(matcher.grammar, None)
            matcher.lexer = -1
            matcher.go_on(self._load_compiler().matcher(matcher.grammar))
        if lost:
            self._fill(lost, words)

    def _fill(self, matchers: Mapping[int, Matcher], words: Words) -> None:
        width = self._load_compiler().mask_words
        masks = words if width == self._num_words else np.empty((len(words), width), np.int32)
        # Each thread takes a part of the list, so in this order they wait the least for lexers.
        order = sorted(matchers.items(), key=lambda item: item[1].lexer)
        fill_next_token_bitmask_par(self._executor, [(one.matcher, row) for row, one in order], masks)
        if masks is not words:
            rows, shared = list(matchers), min(width, self._num_words)
            words[rows] = 0  # logits are padded to more tokens than there are
            words[rows, :shared] = masks[rows, :shared]

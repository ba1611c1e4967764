"""`GrammarMatchers`: follows outputs by their grammars, with the library llguidance.

A grammar is compiled once, which takes a millisecond, and up to fifty. The compiler's thread does it, from the moment
that an output enters a slot: its prompt is computed meanwhile, and only its first mask has to wait. Each output gets a
copy, which takes ten microseconds. Copies share the lexer, which finds its states as they are needed: one thread at a
time can use it, and if it exceeds a limit, it is lost to all of them. So a grammar has a lexer for each of a few
threads if it compiles quickly, and an output whose lexer is lost goes on with one of its own. If that fails too, the
output has an error.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from shared.text.grammars import Compiled, GrammarCompiler
from shared.text.lark import first_lines

Words = npt.NDArray[np.int32]

WORD = 32
"""Tokens of a word of a mask."""

MAX_LEXERS = 4
"""Maximum number of lexers of a grammar."""

QUICK_SECONDS = 0.005
"""A grammar that takes longer to compile has one lexer, so that its copies do not hold up the grammars of others."""

MAX_GRAMMARS = 64
"""Grammars of which the compiled form is kept."""


class _Grammar:
    """A grammar that is compiled once for each lexer, or will be soon."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lexers: list[Future[Compiled | None]] = []  # None: the first one serves instead
        self.num_copies = 0
        self.num_waiting = 0  # outputs that have not had a mask yet

    def is_quick(self) -> bool:
        """Return whether it compiles quickly; True while that is not known."""
        first = self.lexers[0] if self.lexers else None
        compiled = first.result() if first is not None and first.done() else None
        return compiled is None or compiled.seconds < QUICK_SECONDS

    def wait_for(self, index: int) -> tuple[int, LLMatcher]:
        """Wait for a lexer. Return the index of the one that serves, and a matcher at the beginning."""
        compiled = self.lexers[index].result()
        if compiled is not None:
            return index, compiled.matcher
        return self.wait_for(0)


class Matcher:
    """Follows one output. `output` are the tokens that it has seen."""

    def __init__(self, grammar: _Grammar, lexer_index: int, output: Sequence[int]) -> None:
        """The grammar's lexer at `lexer_index` need not be compiled yet."""
        self.grammar = grammar
        self.lexer_index = lexer_index  # -1: it has one of its own
        self.output = list(output)
        self._matcher: LLMatcher | None = None  # if it has waited for its lexer

    @property
    def is_waiting(self) -> bool:
        """Return whether its lexer is still to be waited for."""
        return self._matcher is None

    @property
    def matcher(self) -> LLMatcher:
        """Wait until the grammar is compiled, if that has not been done, and return what follows the output."""
        if self._matcher is None:
            self.lexer_index, shared = self.grammar.wait_for(self.lexer_index)
            self.grammar.num_waiting -= 1
            self.go_on(shared.deep_copy())
        assert self._matcher is not None
        return self._matcher

    def go_on(self, matcher: LLMatcher) -> None:
        """Go on with `matcher`, which stands at the beginning."""
        self._matcher = matcher
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


class GrammarMatchers:
    """The grammars of a model with `vocab_size` logits a position. Masks are made by `num_threads` threads.

    `load_compiler` is called when the first output has a grammar. It raises `QuireError` if there is no compiler.
    """

    def __init__(self, load_compiler: Callable[[], GrammarCompiler], vocab_size: int, num_threads: int) -> None:
        self._load_compiler = load_compiler
        self._num_words = -(-vocab_size // WORD)
        self._num_lexers = min(num_threads, MAX_LEXERS)
        self._executor = LLExecutor(num_threads)
        self._grammars: OrderedDict[str, _Grammar] = OrderedDict()  # by their texts, the one used last at the end

    def start(self, text: str, output: Sequence[int] = ()) -> Matcher:
        """Return a matcher that has seen `output`, and begin to compile its grammar if that is new.

        Raise `QuireError` if nothing compiles grammars.
        """
        grammar = self._grammars.get(text) or _Grammar(text)
        if len(grammar.lexers) < self._num_lexers and grammar.is_quick():
            # By the time that the thread asks whether it is quick, it has compiled the first.
            grammar.lexers.append(self._load_compiler().start(text, grammar.is_quick))
        self._grammars[text] = grammar
        self._grammars.move_to_end(text)
        while len(self._grammars) > MAX_GRAMMARS:
            self._grammars.popitem(last=False)
        matcher = Matcher(grammar, grammar.num_copies % len(grammar.lexers), output)
        grammar.num_copies += 1
        grammar.num_waiting += 1
        return matcher

    def drop(self, matcher: Matcher) -> None:
        """Follow an output no more. A grammar that no other waits for is not compiled, unless that has begun."""
        if not matcher.is_waiting:
            return
        grammar = matcher.grammar
        grammar.num_waiting -= 1
        if not grammar.num_waiting:
            # From the last one on, so that nothing is compiled that asks about the first.
            grammar.lexers = [lexer for lexer in reversed(grammar.lexers) if not lexer.cancel()][::-1]
            if not grammar.lexers:
                self._forget(grammar)

    def fill(self, matchers: Mapping[int, Matcher], words: Words) -> None:
        """Set rows of `words` (M, V / 32) to what their matchers allow next. A row means nothing if there is an error.

        This waits for grammars that are new. A matcher whose lexer is lost gets one of its own.
        """
        if not matchers:
            return
        self._fill(matchers, words)
        lost = {row: one for row, one in matchers.items() if one.lexer_index >= 0 and one.error}
        for matcher in lost.values():
            self._forget(matcher.grammar)
            matcher.lexer_index = -1
            matcher.go_on(self._load_compiler().matcher(matcher.grammar.text))
        if lost:
            self._fill(lost, words)

    def _fill(self, matchers: Mapping[int, Matcher], words: Words) -> None:
        width = self._load_compiler().mask_words
        masks = words if width == self._num_words else np.empty((len(words), width), np.int32)
        ready = [(one.matcher, row, one.lexer_index) for row, one in matchers.items()]  # waiting may change the index
        # Each thread takes a part of the list, so in this order they wait the least for lexers.
        ready.sort(key=lambda item: item[2])
        fill_next_token_bitmask_par(self._executor, [(matcher, row) for matcher, row, _ in ready], masks)
        if masks is not words:
            rows, shared = list(matchers), min(width, self._num_words)
            words[rows] = 0  # logits are padded to more tokens than there are
            words[rows, :shared] = masks[rows, :shared]

    def _forget(self, grammar: _Grammar) -> None:
        """Keep a grammar no longer, so that the next output compiles it anew. A newer one of the same text stays."""
        if self._grammars.get(grammar.text) is grammar:
            del self._grammars[grammar.text]

"""`NewGrammars`: bounds how much the worker has to compile for the sequences that one plan admits.

A worker compiles the grammar of a sequence that enters a slot, and the step that samples its first token waits for that
with all of its streams. So many requests that come at once with grammars of their own are spread over several steps.
How long a text takes is only known afterwards, but schemas take about as long as they are.
"""

from collections.abc import Sequence as Sequences

from services.scheduler.core.sequence import Sequence

MAX_LENGTH = 16_384
"""Characters of all new grammars of a plan: schemas of that length take 30 ms. A longer one is the only new one of
its plan, and gateways refuse what takes more than 50 ms."""

LEAST_LENGTH = 1024
"""The least that a grammar counts, in characters: short expressions may take a few milliseconds too."""


class NewGrammars:
    """The grammars that a plan brings, and which none of the `running` sequences follows."""

    __slots__ = ("_known", "_length", "_running")

    def __init__(self, running: Sequences[Sequence]) -> None:
        self._running = running
        self._known: set[str] | None = None  # made when the first sequence has a grammar
        self._length = 0

    def add(self, sequence: Sequence) -> bool:
        """Add the grammar of a sequence, if it has one. Return False if it has to wait for another plan.

        There is room for the first one, however long it is.
        """
        grammar = sequence.sampling.grammar
        if not grammar:
            return True
        if self._known is None:
            self._known = {other.sampling.grammar for other in self._running}
        if grammar in self._known:
            return True
        length = max(len(grammar), LEAST_LENGTH)
        if self._length and self._length + length > MAX_LENGTH:
            return False
        self._known.add(grammar)
        self._length += length
        return True

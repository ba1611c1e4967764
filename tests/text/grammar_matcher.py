"""`Matcher`: matches texts with a grammar of markers that are tokens of a vocabulary, or only text."""

from collections.abc import Callable, Iterable, Mapping

from tokenizers import AddedToken

from shared.text.grammars import GrammarCompiler
from shared.text.tokenizer import Tokenizer
from tests.text.vocabulary import make_backend

NO_TOKENS = ("[", "{", "<function=", "functools[")
"""Markers that are tokens of no model."""


class Matcher:
    """Matches texts with the grammar that `make_grammar` makes of the ids of the markers that are tokens."""

    def __init__(
        self, markers: Iterable[str], make_grammar: Callable[[Mapping[str, int]], str], *, tokens: bool
    ) -> None:
        self._backend = make_backend()
        names = [marker for marker in markers if marker not in NO_TOKENS]
        if tokens:
            self._backend.add_tokens([AddedToken(name, normalized=False) for name in names])
        grammar = make_grammar({name: id for name in names if (id := self._backend.token_to_id(name)) is not None})
        eos = [self._backend.token_to_id("</s>")]
        self._matcher = GrammarCompiler(Tokenizer(self._backend, eos_token_ids=eos)).matcher(grammar)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def matches(self, text: str) -> bool:
        """Return whether an output may be `text` and end there."""
        ids, matcher = self._backend.encode(text, add_special_tokens=False).ids, self._matcher.deep_copy()
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

"""Draws outputs that a grammar allows, as a model does that knows nothing."""

from random import Random

import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from shared.text.grammars import GrammarCompiler
from shared.text.tokenizer import Tokenizer

ENDINGS = ("</s>", '"', "}", "]", "0", "e", "l")
"""Tokens by which an output comes to its end soon: of strings, objects and lists, numbers, and `true` and `null`."""


class RandomModel:
    """Draws tokens with the masks of a grammar, all equally likely; after `soon` tokens, endings come first."""

    def __init__(self, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
        self._tokenizer, self._compiler = tokenizer, compiler
        self._endings = [id for text in ENDINGS if (id := tokenizer.backend.token_to_id(text)) is not None]
        self._eos = set(tokenizer.eos_token_ids)

    def draw(self, grammar: str, random: Random, *, soon: int = 30, limit: int = 200) -> str | None:
        """Return the text of an output; None if it has no end within `limit` tokens."""
        matcher, output = self._compiler.matcher(grammar), list[int]()
        words = np.empty((1, self._compiler.mask_words), np.int32)
        while len(output) < limit:
            fill_next_token_bitmask(matcher, words)
            assert not matcher.is_error(), matcher.get_error()
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
            assert allowed, "something is always allowed"
            token = random.choice(allowed)
            if len(output) >= soon:
                token = next((ending for ending in self._endings if ending in allowed), token)
            if token in self._eos:
                return self._tokenizer.decode(output)
            assert matcher.consume_token(token), matcher.get_error()
            output.append(token)
        return None

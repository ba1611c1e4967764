"""Tests of the part of a text that is kept of a prompt."""

import random

import pytest

from shared.text import tokenizer as module
from tests.text.vocabulary import WORDS, make_tokenizer

WORD_TEXTS = [word.replace("Ġ", " ") for word in WORDS]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("keep_start", [False, True])
def test_the_kept_tokens_are_those_of_the_whole_text(bos: bool, keep_start: bool) -> None:
    """Also of a text that is so long that only a part of it is encoded."""
    tokenizer = make_tokenizer(bos=bos)
    rng = random.Random(7)
    for length in (1, 2, 5, 40, 3000):
        text = "".join(rng.choice(WORD_TEXTS) for _ in range(length))
        entire = tokenizer.encode(text)
        special, content = entire[:bos], entire[bos:]
        for max_tokens in (1, 2, 3, 17, len(entire) - 1, len(entire), len(entire) + 1):
            if max_tokens < 1:
                continue
            ids, was_cut = tokenizer.encode_part(text, max_tokens, keep_start=keep_start)
            room = max_tokens - len(special)
            if len(entire) <= max_tokens:
                expected = entire
            elif room < 1:
                expected = entire[:1] if keep_start else entire[-1:]
            else:
                expected = special + (content[:room] if keep_start else content[-room:])
            assert (ids, was_cut) == (expected, len(entire) > max_tokens)


def test_only_a_part_of_a_long_text_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client could otherwise have a text of any length encoded."""
    tokenizer = make_tokenizer()
    encoded: list[int] = []
    encode = module.Tokenizer._encode_batch

    def note(self: module.Tokenizer, texts: list[str], add_special_tokens: bool) -> list[object]:
        encoded.extend(map(len, texts))
        return encode(self, texts, add_special_tokens)  # type: ignore[return-value]

    monkeypatch.setattr(module.Tokenizer, "_encode_batch", note)
    tokenizer.encode_part("x " * 10**6, 10)
    assert encoded == [tokenizer.max_characters(10 + module.CUT_MARGIN)]

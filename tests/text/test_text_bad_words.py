"""Tests which sequences of tokens `bad_words` rule out."""

import pytest

from shared.errors import InvalidRequest
from shared.text.bad_words import tokenize_bad_words
from shared.text.tokenizer import Tokenizer
from tests.text.vocabulary import make_tokenizer

TOKENIZER = make_tokenizer(bos=True)
PREFIXING = make_tokenizer(["Ġtwo"])
"""Its tokens differ behind a space: "two" has three, and " two" one."""


def ids(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_word_is_ruled_out_at_the_beginning_and_behind_a_space() -> None:
    assert tokenize_bad_words(["two"], PREFIXING) == [ids("two", PREFIXING), ids(" two", PREFIXING)]
    assert [len(word) for word in tokenize_bad_words(["two"], PREFIXING)] == [3, 1]
    assert tokenize_bad_words(["one", "hello"], TOKENIZER) == [ids("one"), ids(" one"), ids("hello"), ids(" hello")]


def test_each_sequence_comes_once_whatever_spaces_are_before_the_word() -> None:
    assert tokenize_bad_words(["two", " two", "  two"], TOKENIZER) == tokenize_bad_words(["two"], TOKENIZER)
    assert tokenize_bad_words([], TOKENIZER) == []


def test_white_space_is_a_word_too() -> None:
    assert tokenize_bad_words(["\n", " "], TOKENIZER) == [ids("\n"), ids(" ")]


def test_special_tokens_are_known_by_their_text() -> None:
    assert [TOKENIZER.token_id("</s>")] in tokenize_bad_words(["</s>"], TOKENIZER)


def test_sequences_are_counted_after_tokenizing() -> None:
    words = [chr(ord("a") + at % 26) * (1 + at // 26) for at in range(64)]
    assert len(tokenize_bad_words(words, TOKENIZER)) == 128
    with pytest.raises(InvalidRequest, match=r"at most 128 sequences of tokens, got 130") as caught:
        tokenize_bad_words([*words, "!"], TOKENIZER)
    assert caught.value.param == "bad_words"


def test_a_word_of_many_tokens_is_named_with_their_number() -> None:
    assert len(tokenize_bad_words(["x" * 63], TOKENIZER)[1]) == 64
    with pytest.raises(InvalidRequest, match=r"at most 64 tokens, but ' x+...x+' has 65") as caught:
        tokenize_bad_words(["x" * 64], TOKENIZER)
    assert caught.value.param == "bad_words"


def test_half_of_a_surrogate_pair_is_no_word() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenize_bad_words(["\ud800"], TOKENIZER)

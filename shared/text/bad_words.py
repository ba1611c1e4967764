"""`tokenize_bad_words`: the sequences of tokens that an output must not have, for `bad_words`."""

from collections.abc import Sequence

from shared.errors import InvalidRequest, brief
from shared.protocol import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from shared.text.tokenizer import Tokenizer


def tokenize_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of each word, as it stands at the beginning of a text and behind a space, each sequence once.

    Many tokenizers write a word with other tokens behind a space, so that there are two sequences. Raise
    `InvalidRequest` if there are too many, or one is too long.
    """
    if not words:
        return []
    texts = [text for word in words for text in _forms(word)]
    sequences = dict.fromkeys(tuple(ids) for ids in tokenizer.encode_all(texts, add_special_tokens=False) if ids)
    if len(sequences) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words must be at most {MAX_BAD_WORDS} sequences of tokens, got {len(sequences)}: most words are one "
            "at the beginning of a text, and another behind a space",
            "bad_words",
        )
    for ids in sequences:
        if len(ids) > MAX_BAD_WORD_TOKENS:
            word = brief(tokenizer.decode(ids))
            raise InvalidRequest(
                f"a word of bad_words must have at most {MAX_BAD_WORD_TOKENS} tokens, but {word} has {len(ids)}",
                "bad_words",
            )
    return [list(ids) for ids in sequences]


def _forms(word: str) -> list[str]:
    """Return the texts in which a word comes. White space before it does not count, unless there is nothing else."""
    bare = word.lstrip()
    return [bare, f" {bare}"] if bare else [word]

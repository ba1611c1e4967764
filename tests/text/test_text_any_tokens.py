"""Tests that streaming any ids, in any type of vocabulary, gives the text of decoding them all at once.

The library's decoder is the reference. If bytes of a byte-fallback vocabulary are invalid, it makes U+FFFD of the whole
run of bytes, valid characters included, which no stream can know in time. There the reference gets the same run with
U+FFFD in place of the invalid bytes. QUIRE_TEST_SEQUENCES=100000 draws that many sequences per type, instead of 1000.
"""

import os
import random
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

import pytest

from shared.text.detokenizer import Detokenizer
from tests.text.vocabulary import KINDS, Vocabulary, make_vocabulary

SEQUENCES = int(os.environ.get("QUIRE_TEST_SEQUENCES", "1000"))
CHARACTERS = ["a", " ", "\n", "é", "\u07ff", "\u0800", "一", "\ufffd", "\uffff", "😀", "\U0010ffff"]
UNFINISHED = re.compile(  # the beginning of a character, by the table of well-formed UTF-8 in the Unicode standard
    rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3](?:[\x80-\xbf][\x80-\xbf]?)?|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
)


def sequence(rng: random.Random, vocabulary: Vocabulary) -> list[int]:
    """Return up to about 30 ids: texts with changed bytes, silent tokens, runs of one byte, and random ids."""
    ids: list[int] = []
    for _ in range(rng.randint(1, 6)):
        choice = rng.random()
        if choice < 0.5 and vocabulary.byte_ids:
            ids += [vocabulary.byte_ids[byte] for byte in mutated(rng)]
        elif choice < 0.6 and vocabulary.byte_ids:
            ids += [vocabulary.byte_ids[rng.choice([0x80, 0xBF, 0xC3, 0xE4, 0xF0, 0xFF])]] * rng.randint(1, 20)
        elif choice < 0.75:
            ids += rng.choices(vocabulary.silent_ids, k=rng.choice([1, 2, 20]))
        else:
            ids += rng.choices(vocabulary.shown_ids, k=rng.randint(1, 5))
    return ids


def mutated(rng: random.Random) -> bytes:
    data = bytearray("".join(rng.choices(CHARACTERS, k=rng.randint(1, 4))).encode())
    for _ in range(rng.choice([0, 0, 1, 2])):
        at = rng.randrange(len(data))
        if rng.random() < 0.5 and len(data) > 1:
            del data[at]
        else:
            data[at] = rng.randrange(256)
    return bytes(data)


def decoded(vocabulary: Vocabulary, ids: Sequence[int], hidden: frozenset[int]) -> str:
    """Return the library's text of `ids` without those that are `hidden`."""
    decodable = [id for id in ids if id not in hidden and vocabulary.tokenizer.backend.id_to_token(id) is not None]
    return vocabulary.tokenizer.backend.decode(list(_spelled(vocabulary, decodable)), skip_special_tokens=False)


def _spelled(vocabulary: Vocabulary, ids: Sequence[int]) -> Iterator[int]:
    """Yield the ids, with the invalid bytes of each run of byte-fallback tokens replaced by U+FFFD."""
    value = {id: byte for byte, id in enumerate(vocabulary.byte_ids)}
    is_fallback = bool(value) and "ByteFallback" in str(vocabulary.tokenizer.backend.decoder)
    for is_run, run in groupby(ids, lambda id: is_fallback and id in value):
        if is_run:
            text = bytes(value[id] for id in run).decode(errors="replace")
            yield from (vocabulary.byte_ids[byte] for byte in text.encode())
        else:
            yield from run


def unfinished(vocabulary: Vocabulary, ids: Sequence[int], hidden: frozenset[int]) -> bool:
    """Return whether the bytes of all ids end inside a character."""
    return (
        UNFINISHED.search(b"".join(vocabulary.tokenizer.token_bytes(id) for id in ids if id not in hidden)) is not None
    )


def certain(vocabulary: Vocabulary, ids: Sequence[int], hidden: frozenset[int]) -> str:
    """Return the text of `ids` without an incomplete character at their end."""
    text = decoded(vocabulary, ids, hidden)
    return text[:-1] if unfinished(vocabulary, ids, hidden) else text


def draws(kind: str, count: int = SEQUENCES) -> Iterator[tuple[random.Random, Vocabulary, list[int]]]:
    vocabulary, rng = make_vocabulary(kind), random.Random(kind)
    for _ in range(count):
        yield rng, vocabulary, sequence(rng, vocabulary)


@pytest.mark.timeout(0 if SEQUENCES > 1000 else 300)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_any_tokens_is_that_of_one_decoding_and_only_an_unfinished_character_waits(kind: str) -> None:
    """TXT-01, TXT-02, TXT-03: the text so far is that of the tokens so far, after each token."""
    for rng, vocabulary, ids in draws(kind):
        skip = rng.random() < 0.5
        hidden = vocabulary.tokenizer.special_ids if skip else frozenset()
        detokenizer = Detokenizer(vocabulary.tokenizer, [], skip)
        text = ""
        for at, token in enumerate(ids, 1):
            text += detokenizer.push(token)
            assert text == certain(vocabulary, ids[:at], hidden), (ids[:at], skip)
        whole = decoded(vocabulary, ids, hidden)
        assert text + detokenizer.flush() == vocabulary.tokenizer.decode(ids, skip) == whole, (ids, skip)


@pytest.mark.timeout(0 if SEQUENCES > 1000 else 300)
@pytest.mark.parametrize("kind", KINDS)
def test_behind_any_prompt_the_text_goes_on_where_the_prompts_last_whole_character_ends(kind: str) -> None:
    """TXT-01, TXT-03, TOK-03: also if the prompt ends inside a character, or in hidden tokens behind a part of one."""
    for rng, vocabulary, ids in draws(kind):
        skip, cut = rng.random() < 0.5, rng.randrange(len(ids) + 1)
        hidden = vocabulary.tokenizer.special_ids if skip else frozenset()
        detokenizer = Detokenizer(vocabulary.tokenizer, ids[:cut], skip)
        text = "".join(map(detokenizer.push, ids[cut:])) + detokenizer.flush()
        behind = [id for id in ids[cut:] if id not in hidden and vocabulary.tokenizer.token_bytes(id)]
        if unfinished(vocabulary, ids[:cut], hidden) and not behind:
            assert text == ""  # nothing of the prompt alone
        else:
            before = certain(vocabulary, ids[:cut], hidden)
            assert before + text == decoded(vocabulary, ids, hidden), (ids[:cut], ids[cut:], skip)


STRIPPED = "byte-fallback, stripped"


@pytest.mark.parametrize("kind", ["byte-fallback", STRIPPED])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    "written",
    ["▁Hi" + "▁a" * 29, "▁1▁22▁2024", "▁a:\n▁▁▁▁a\n\n▁▁a▁▁\n", "a▁Hi", "▁", "▁▁▁a\n", "▁Hi▁"],
)
def test_spaces_and_newlines_are_kept(kind: str, behind: bool, written: str) -> None:
    """TOK-04: SentencePiece writes the space before a word with the word, and a text's first one may not show."""
    vocabulary = make_vocabulary(kind)
    ids = spelled(vocabulary, written)
    text = written.replace("▁", " ")
    if kind == STRIPPED and not behind:
        text = text.removeprefix(" ")
    detokenizer = Detokenizer(vocabulary.tokenizer, spelled(vocabulary, "▁Hi") if behind else [])
    shown = [*map(detokenizer.push, ids), detokenizer.flush()]
    assert "".join(shown) == text
    assert all(shown[1:-1]), "each token's text comes with the token"


def spelled(vocabulary: Vocabulary, written: str) -> list[int]:
    """Return the longest pieces of which `written` consists, and byte tokens for what is in none."""
    ids: list[int] = []
    while written:
        size = next((size for size in (3, 2, 1) if vocabulary.tokenizer.token_id(written[:size]) is not None), 0)
        token = vocabulary.tokenizer.token_id(written[:size]) if size else vocabulary.byte_ids[ord(written[0])]
        assert token is not None
        ids.append(token)
        written = written[size or 1 :]
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_an_echo_and_what_follows_are_one_text(kind: str) -> None:
    """TXT-05: the special tokens of the prompt show, and those behind it by choice."""
    for rng, vocabulary, ids in draws(kind, 200):
        skip, cut = rng.random() < 0.5, rng.randrange(len(ids) + 1)
        tokenizer = vocabulary.tokenizer
        shown = [*ids[:cut], *(id for id in ids[cut:] if not (skip and id in tokenizer.special_ids))]
        detokenizer = Detokenizer(tokenizer, ids[:cut], skip, echo=True)
        echo = tokenizer.decode(ids[:cut], skip_special_tokens=False, final=False)
        text = echo + "".join(map(detokenizer.push, ids[cut:])) + detokenizer.flush()
        assert text == decoded(vocabulary, shown, frozenset())


def pieces(vocabulary: Vocabulary, ids: Sequence[int]) -> list[str]:
    """Return the text that each token shows, and at last the text that was held back."""
    detokenizer = Detokenizer(vocabulary.tokenizer, [])
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize(
    ("spelled", "shown"),
    [
        (b"\xc3\xa9\xe9a", ["", "é", "", "\ufffda", ""]),
        (b"\xff" * 14 + "😀A".encode(), ["\ufffd"] * 14 + ["", "", "", "😀", "A", ""]),
        (b"\xef\xbf\xbd" * 20, ["", "", "\ufffd"] * 20 + [""]),
        (b"\xf0\x9f\x98", ["", "", "", "\ufffd"]),
        (b"\xed\xa0\x80", ["", "\ufffd\ufffd", "\ufffd", ""]),  # half of a surrogate pair is not a character
        (b"\xe4\xb8\xe4\xb8\x80", ["", "", "\ufffd", "", "一", ""]),
    ],
)
def test_bytes_that_are_no_character_show_as_soon_as_that_is_certain(
    kind: str, spelled: bytes, shown: list[str]
) -> None:
    """TXT-01, TXT-02"""
    vocabulary = make_vocabulary(kind)
    ids = [vocabulary.byte_ids[byte] for byte in spelled]
    assert pieces(vocabulary, ids) == shown
    assert vocabulary.tokenizer.decode(ids) == "".join(shown) == spelled.decode(errors="replace")


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize("count", [1, 13, 15, 16, 40])
def test_hidden_tokens_before_and_inside_a_character_do_not_harm_it(kind: str, count: int) -> None:
    """TXT-03"""
    vocabulary = make_vocabulary(kind)
    smile = [vocabulary.byte_ids[byte] for byte in "😀".encode()]
    for silent in vocabulary.silent_ids:
        for at in range(4):
            ids = [*smile[:at], *[silent] * count, *smile[at:]]
            assert "".join(pieces(vocabulary, ids)) == "😀"
            detokenizer = Detokenizer(vocabulary.tokenizer, ids[: at + count])
            assert "".join(map(detokenizer.push, ids[at + count :])) == "😀"

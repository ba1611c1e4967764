"""Tests of which part of a prompt is kept."""

from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.text.truncation import Truncation
from tests.text.vocabulary import make_tokenizer

IDS = list(range(10))


def cut(length: Any, side: Any = None, *, max_tokens: int | None = 4, default: int | None = None) -> list[int]:
    limits = {"max_tokens": max_tokens, "default_max_tokens": default}
    truncation = Truncation.of(length, side, max_model_len=8, **limits)
    return IDS if truncation is None else truncation.cut(IDS)


@pytest.mark.parametrize(
    ("length", "side", "kept"),
    [
        (None, None, IDS),
        (3, None, [7, 8, 9]),
        (3, "left", [7, 8, 9]),
        (3, "right", [0, 1, 2]),
        (3.0, None, [7, 8, 9]),
        (4, None, [6, 7, 8, 9]),
        (-1, None, [6, 7, 8, 9]),
        (-1, "right", [0, 1, 2, 3]),
    ],
)
def test_the_end_is_kept_unless_the_side_says_otherwise(length: Any, side: Any, kept: list[int]) -> None:
    assert cut(length, side) == kept


def test_what_fits_depends_on_the_output() -> None:
    assert len(cut(-1, max_tokens=None)) == 7
    assert len(cut(-1, max_tokens=None, default=5)) == 3
    assert len(cut(-1, max_tokens=None, default=100)) == 7
    assert len(cut(-1, max_tokens=7)) == 1
    short = Truncation.of(7, None, max_tokens=None, max_model_len=8)
    assert short is not None
    assert short.cut([1, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "param", "message"),
    [
        ((0,), "truncate_prompt_tokens", "must be -1 or between 1 and 4"),
        ((5,), "truncate_prompt_tokens", "must be -1 or between 1 and 4"),
        ((-2,), "truncate_prompt_tokens", "got -2"),
        (("3",), "truncate_prompt_tokens", "must be a whole number"),
        ((3, "middle"), "truncation_side", "must be left or right, got 'middle'"),
        ((None, 5), "truncation_side", "must be left or right, got 5"),
    ],
)
def test_what_cannot_be_kept_is_named(arguments: tuple[Any, ...], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        cut(*arguments)
    assert caught.value.param == param


def test_an_output_as_long_as_the_context_leaves_no_room() -> None:
    with pytest.raises(InvalidRequest, match="leaves no room for a prompt") as caught:
        cut(-1, max_tokens=8)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(("keep_start", "kept"), [(False, [8, 9]), (True, [0, 1])])
def test_of_a_text_the_tokens_that_are_added_stay(keep_start: bool, kept: list[int]) -> None:
    """As in transformers: the model expects its BOS."""
    tokenizer = make_tokenizer(bos=True)
    bos, *content = tokenizer.encode("0123456789")
    ids, was_cut = tokenizer.encode_part("0123456789", 3, keep_start=keep_start)
    assert (ids, was_cut) == ([bos, *(content[at] for at in kept)], True)
    assert tokenizer.encode_part("01", 3) == ([bos, *content[:2]], False)

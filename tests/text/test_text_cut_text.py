"""Tests of texts that are cut in the names of special tokens."""

from hypothesis import given
from hypothesis import strategies as st

from shared.text import cut_text
from shared.text.cut_text import CutText, NameCutter

MARK = "#"
NAMES = st.sets(st.text("<|ab", min_size=1, max_size=5), min_size=1, max_size=8)


def cut(names: set[str], *texts: str) -> list[str]:
    """Return the pieces of texts that stand one behind the other."""
    cutter = NameCutter(names)
    return CutText.at(MARK, "".join(cutter.mark(text, MARK) for text in texts)).pieces


@given(NAMES, st.text("<|ab", max_size=20))
def test_the_longest_name_at_each_place_is_found(names: set[str], text: str) -> None:
    found = NameCutter(names)._names.match(text)
    assert (found[1] if found else None) == max(filter(text.startswith, names), key=len, default=None)


@given(NAMES, st.lists(st.text("<|ab", max_size=6), max_size=5))
def test_no_piece_has_a_name_whatever_the_names_and_texts_are(names: set[str], texts: list[str]) -> None:
    """Also where names overlap, or one is in another one."""
    pieces = cut(names, *texts)
    assert "".join(pieces) == "".join(texts)
    assert not any(len(name) > 1 and name in piece for name in names for piece in pieces)


@given(st.text("<a>x", max_size=30), st.integers(1, 5))
def test_windows_make_no_difference(text: str, window: int) -> None:
    whole = cut({"<a>", "<aa>", "x<"}, text)
    before, cut_text.WINDOW = cut_text.WINDOW, window
    try:
        assert "".join(cut({"<a>", "<aa>"}, text)) == text
        assert len(cut({"<a>", "<aa>", "x<"}, text)) >= len(whole)
        assert all("<a>" not in piece and "<aa>" not in piece for piece in cut({"<a>", "<aa>"}, text))
    finally:
        cut_text.WINDOW = before


def test_every_text_of_a_message_is_marked() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a</s>b"}], "</s>": [None, 1, "x<"]}
    assert NameCutter(["</s>"]).mark(message, MARK) == {
        "role": "user", "content": [{"type": "text", "text": "a<#/s>b"}], "<#/s>": [None, 1, "x<#"],
    }  # fmt: skip

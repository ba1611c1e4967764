"""Tests the prefix index: a block is found by its own tokens and by all tokens before it, exactly."""

from array import array

from services.scheduler.core.prefix import PrefixIndex


def _tokens(*ids: int) -> "array[int]":
    return array("i", ids)


def _blocks(index: PrefixIndex, *ids: int, salt: str = "") -> list[int]:
    return [entry.block for entry in index.match_prefix(_tokens(*ids), salt)]


def test_a_block_is_found_behind_its_own_prefix_only() -> None:
    index = PrefixIndex(2)
    first = index.publish("", _tokens(1, 2), 10)
    other = index.publish("", _tokens(3, 4), 11)
    index.publish(first, _tokens(5, 6), 12)
    index.publish(other, _tokens(5, 6), 13)
    assert _blocks(index, 1, 2, 5, 6, 7) == [10, 12]
    assert _blocks(index, 3, 4, 5, 6) == [11, 13]
    assert _blocks(index, 5, 6) == []
    assert _blocks(index, 1) == []
    assert len(index) == 4


def test_a_duplicate_stays_private_and_the_chain_goes_on_behind_the_first() -> None:
    index = PrefixIndex(1)
    node = index.publish("", _tokens(1), 10)
    assert index.publish("", _tokens(1), 20) == node
    index.publish(node, _tokens(2), 21)
    assert _blocks(index, 1, 2) == [10, 21]
    assert 20 not in index


def test_a_forgotten_serial_is_never_used_again() -> None:
    index = PrefixIndex(1)
    old = index.publish("", _tokens(1), 10)
    index.publish(old, _tokens(2), 11)
    index.forget(10)
    index.forget(10)
    assert _blocks(index, 1, 2) == []
    assert index.publish("", _tokens(1), 12) != old
    assert _blocks(index, 1, 2) == [12], "what was published behind the forgotten one is out of reach"


def test_a_block_keeps_the_key_under_which_it_was_published() -> None:
    index = PrefixIndex(1)
    first = index.publish("", _tokens(1), 10)
    second = index.publish(first, _tokens(2), 11)
    index.forget(10)
    again = index.publish("", _tokens(1), 12)
    assert index.publish(again, _tokens(2), 11) == second, "another holder of 11 goes on behind it"
    index.forget(11)
    assert repr(index) == "<PrefixIndex 1 blocks>"


def test_prompts_of_different_salts_share_nothing() -> None:
    index = PrefixIndex(1)
    for salt, block in (("", 10), ("a", 20), ("b", 30)):
        index.publish(index.publish(salt, _tokens(1), block), _tokens(2), block + 1)
    assert _blocks(index, 1, 2) == [10, 11]
    assert _blocks(index, 1, 2, salt="a") == [20, 21]
    assert _blocks(index, 1, 2, salt="c") == []
    index.forget(20)
    assert _blocks(index, 1, 2, salt="a") == []
    assert _blocks(index, 1, 2, salt="b") == [30, 31]


def test_after_a_reset_nothing_is_found_nor_what_is_published_behind_it() -> None:
    index = PrefixIndex(1)
    node = index.publish("", _tokens(1), 10)
    index.clear()
    assert (_blocks(index, 1), len(index), 10 in index) == ([], 0, False)
    index.publish(node, _tokens(2), 11)
    assert index.publish("", _tokens(1), 12) != node
    assert _blocks(index, 1, 2) == [12]

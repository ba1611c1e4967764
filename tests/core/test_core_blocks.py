"""Tests the block pool: its counts, its pins and the order in which blocks are used again."""

import pytest

from services.scheduler.core.blocks import BlockPool


def test_blocks_are_taken_from_the_cold_end() -> None:
    pool = BlockPool(4)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    pool.release(1, keep=True)
    pool.release(0, keep=False)
    pool.release(2, keep=True)
    assert [pool.take() for _ in range(4)] == [0, 3, 1, 2], "what is not worth keeping goes first, the rest by age"
    with pytest.raises(KeyError):
        pool.take()


def test_a_shared_block_comes_free_with_its_last_holder() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.share(block)
    pool.release(block, keep=True)
    assert (pool.refs[block], pool.num_free) == (1, 1)
    pool.release(block, keep=True)
    assert (pool.refs[block], pool.num_free) == (0, 2)


def test_a_free_block_can_be_held_again_from_the_middle_of_the_list() -> None:
    pool = BlockPool(3)
    pool.share(1)
    assert (pool.refs, pool.num_free, pool.is_free(1)) == ([0, 1, 0], 2, False)
    assert [pool.take(), pool.take()] == [0, 2]


def test_a_pinned_block_is_not_taken_before_each_pin_is_undone() -> None:
    pool = BlockPool(2)
    pool.pin(0)
    pool.pin(0)
    assert (pool.num_free, pool.take()) == (1, 1)
    pool.unpin(0, keep=True)
    assert pool.num_free == 0
    pool.unpin(0, keep=True)
    assert pool.take() == 0


def test_a_pin_outlives_the_last_holder_and_the_other_way_round() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.pin(block)
    pool.release(block, keep=True)
    assert pool.num_free == 0
    pool.share(block)
    pool.unpin(block, keep=True)
    assert pool.num_free == 0
    pool.release(block, keep=True)
    assert pool.num_free == 1
    assert repr(pool) == "<BlockPool 1/1 free, 0 pinned>"

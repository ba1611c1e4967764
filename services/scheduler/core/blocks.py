"""`BlockPool`: the reference counts of the blocks of KV memory, and the free ones in the order of their reuse.

It knows neither sequences nor content: whoever releases a block says whether it is worth keeping. The blocks of the
device have one pool, and those of host memory another.

A block is *held* by the tables it stands in, and *pinned* by plans in flight that copy from it, or to it if it is of
host memory. A block that is neither is on the free list, which is in eviction order: the cold end is taken first.
"""

from collections import OrderedDict


class BlockPool:
    """Blocks 0 to `num_blocks - 1`, all free at first."""

    __slots__ = ("_free", "_pins", "num_blocks", "refs")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks  # tables that a block stands in
        self._pins: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """The number of blocks that are neither held nor pinned."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Return whether a block is neither held nor pinned."""
        return block in self._free

    def take(self) -> int:
        """Take the coldest free block and return it, with one reference. Raise KeyError if none is free."""
        block, _ = self._free.popitem(last=False)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block, which may be free."""
        if not self.refs[block]:
            self._free.pop(block, None)  # it may be pinned only
        self.refs[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Drop a reference to a block. If it becomes free, `keep` puts it at the hot end, else it is taken next."""
        self.refs[block] -= 1
        self._free_if_unused(block, keep)

    def touch(self, block: int) -> None:
        """Put a block at the hot end of the free list, if it is there."""
        if block in self._free:
            self._free.move_to_end(block)

    def pin(self, block: int) -> None:
        """Keep a block that a plan names off the free list until `unpin`. Its holder may still write to it."""
        self._free.pop(block, None)
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block: int, *, keep: bool) -> None:
        """Undo one `pin`. `keep` is as in `release`."""
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
        self._free_if_unused(block, keep)

    def _free_if_unused(self, block: int, keep: bool) -> None:
        if self.refs[block] or block in self._pins:
            return
        self._free[block] = None
        if not keep:
            self._free.move_to_end(block, last=False)

    def __repr__(self) -> str:
        return f"<BlockPool {len(self._free)}/{self.num_blocks} free, {len(self._pins)} pinned>"

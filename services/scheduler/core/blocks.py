"""`BlockPool`: which blocks of KV memory are held, how often, and in which order the free ones are reused.

It knows neither sequences nor content: whoever gives a block back says whether it is worth keeping.

A block is *held* by the tables it stands in, and *pinned* by plans in flight that copy from it. With neither, it is on
the free list, which is in eviction order: the cold end is taken first.
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
    def free(self) -> int:
        """Blocks with no holder and no pin."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Whether nothing holds or pins it."""
        return block in self._free

    def take(self) -> int:
        """The coldest free block, now held once; KeyError if there is none."""
        block, _ = self._free.popitem(last=False)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table holds it, free or not."""
        if not self.refs[block]:
            self._free.pop(block, None)  # it may be pinned only
        self.refs[block] += 1

    def give(self, block: int, *, keep: bool) -> None:
        """One table less holds it. If it comes free, `keep` puts it at the hot end, else it is the next to be taken."""
        self.refs[block] -= 1
        self._settle(block, keep)

    def pin(self, block: int) -> None:
        """A plan reads it: it does not come free before `unpin`. Writing to it stays allowed (see memory.py)."""
        self._free.pop(block, None)
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block: int, *, keep: bool) -> None:
        """Undo one `pin`; `keep` as with `give`."""
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
        self._settle(block, keep)

    def _settle(self, block: int, keep: bool) -> None:
        if self.refs[block] or block in self._pins:
            return
        self._free[block] = None
        if not keep:
            self._free.move_to_end(block, last=False)

    def __repr__(self) -> str:
        return f"<BlockPool {len(self._free)}/{self.num_blocks} free, {len(self._pins)} pinned>"

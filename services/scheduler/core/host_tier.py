"""`HostTier`: the blocks of host memory, what each of them holds, and the copies that the next plan has to make.

It is the second level of the prefix index. A published block that the device reuses for something else is copied to
host memory first (`keep`), and a prefix that is found here is copied back instead of being computed. A sequence that is
preempted may have all its blocks copied (`hold`): they stay here until it runs again. Rules that hold between any two
calls:

- A host block is *held* by the swapped sequences that need it, and *pinned* by the plan that copies to it or from it,
  until that plan's result is back. Only one that is neither is reused; the one that was unused for longest comes first.
- A plan copies to host memory before it copies or computes anything. So a block of the device may be reused by the very
  plan that saves its content, if that is the next one that is made.
- A host block that a plan copies to can be read by plans that are made after that plan's result is back. So no two
  plans in flight name a host block, unless both read it.
- What is copied back also stays here, so it need not be copied again when the device reuses its block once more.
"""

from array import array
from itertools import takewhile

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.prefix import Content, Entry, Node, PrefixIndex

Move = tuple[int, int]
"""The source and the destination of a copy between the device and host memory."""


class HostTier:
    """Host blocks 0 to `num_blocks - 1`, for as many tokens each as the device's."""

    __slots__ = ("_incoming", "_outgoing", "_written", "index", "num_held", "pool")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(block_size)
        self.num_held = 0  # host blocks that swapped sequences hold, each shared one counted once
        self._outgoing: dict[int, int] = {}  # host block to copy to: block, in the order of the next plan
        self._incoming: dict[int, int] = {}  # block to copy to: host block
        self._written: dict[int, None] = {}  # host blocks that plans in flight copy to

    def keep(self, content: Content, node: int, block: int) -> None:
        """Copy the content of `block`, which is about to be reused, if it is not here and there is room."""
        known = self.index.find(content)
        if known is not None:
            self.pool.touch(known.block)
        elif self.pool.num_free:
            host_block = self._take()
            self.index.add(content, host_block, node)
            self._copy_out(block, host_block)
            self.pool.release(host_block, keep=True)

    def hold(self, blocks: list[int], contents: list[tuple[Content, int]]) -> list[int] | None:
        """Copy `blocks` and hold the copies until `release`. Return the host blocks; None if there is no room for all.

        The first of them have `contents`, each with its node; the others are private to the sequence.
        """
        known = [self.index.find(content) for content, _ in contents]
        num_known = sum(entry is not None for entry in known)
        num_taken = sum(entry is not None and self.pool.is_free(entry.block) for entry in known)
        if len(blocks) - num_known + num_taken > self.pool.num_free:
            return None
        for entry in known:  # before `_take`, which might take one of these
            if entry is not None:
                self.num_held += not self.pool.refs[entry.block]
                self.pool.share(entry.block)
        self.num_held += len(blocks) - num_known
        held: list[int] = []
        for index, block in enumerate(blocks):
            entry = known[index] if index < len(known) else None
            if entry is not None:
                held.append(entry.block)
                continue
            held.append(self._take())
            self._copy_out(block, held[-1])
            if index < len(contents):
                self.index.add(contents[index][0], held[-1], contents[index][1])
        return held

    def release(self, host_blocks: list[int]) -> None:
        """Release what `hold` has returned. What is published stays until its blocks are reused."""
        for host_block in reversed(host_blocks):  # the beginning of a prompt is reused last
            self.pool.release(host_block, keep=host_block in self.index)
            self.num_held -= not self.pool.refs[host_block]

    def can_read(self, host_block: int) -> bool:
        """Return whether the content of a host block is there, so that the next plan may copy it."""
        return host_block not in self._outgoing and host_block not in self._written

    def is_written(self, host_block: int) -> bool:
        """Return whether a plan in flight copies to a host block."""
        return host_block in self._written

    def match_prefix(self, tokens: "array[int]", before: Node) -> list[Entry]:
        """Return the host blocks that hold the beginning of `tokens` and can be read. `before` stands before them."""
        return list(takewhile(lambda entry: self.can_read(entry.block), self.index.match_prefix(tokens, before)))

    def pin(self, host_block: int) -> None:
        """Pin a host block that the next plan names: `take_moves` hands it over, and `unpin` ends it."""
        self.pool.pin(host_block)

    def copy_in(self, host_block: int, block: int) -> None:
        """Have the next plan copy a host block, which must be pinned for it, to a block of the device."""
        self._incoming[block] = host_block

    def incoming(self, block: int) -> int | None:
        """Return the host block that the next plan copies to `block`, if it does."""
        return self._incoming.get(block)

    def take_moves(self) -> tuple[list[Move], list[Move]]:
        """Return the copies that the plan being made must name: (block, host block), and (host block, block)."""
        swap_out = [(block, host_block) for host_block, block in self._outgoing.items()]
        swap_in = [(host_block, block) for block, host_block in self._incoming.items()]
        self._written.update(dict.fromkeys(self._outgoing))
        self._outgoing.clear()
        self._incoming.clear()
        return swap_out, swap_in

    def unpin(self, host_blocks: list[int]) -> None:
        """Unpin the host blocks that a plan named, now that its result is back."""
        for host_block in host_blocks:
            self._written.pop(host_block, None)
            self.pool.unpin(host_block, keep=host_block in self.index)

    def _take(self) -> int:
        host_block = self.pool.take()
        self.index.forget(host_block)
        return host_block

    def _copy_out(self, block: int, host_block: int) -> None:
        self.pool.pin(host_block)
        self._outgoing[host_block] = block

    def __repr__(self) -> str:
        return f"<HostTier {self.pool!r} {self.index!r}>"

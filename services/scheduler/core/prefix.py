"""`PrefixIndex`: finds the blocks that hold the beginning of a prompt.

It is a trie written as a dict. The key of a block is (node of the block before it, bytes of its own tokens). That is
the content itself, with no hash that could collide, so a hit is always right. A node is a number, new for each block
that is published and never used again. Before the first block of a prompt stands a text, the *root* of its request: the
number of its adapter and its `cache_salt`. So prompts of different adapters or salts share no block, nor do those of an
adapter and of what was loaded later under its name. When a block is forgotten, blocks published behind it cannot be
reached any more; they are dropped when they are taken. The index does not know who holds a block.
"""

from array import array
from typing import NamedTuple, TypeAlias

Node: TypeAlias = int | str
"""What stands before a block: a published block's number, or the root before every first block."""


class Entry(NamedTuple):
    """A published block."""

    block: int
    node: int


class PrefixIndex:
    """Published blocks of `block_size` tokens each."""

    __slots__ = ("_block_size", "_entries", "_keys", "_last_node")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[tuple[Node, bytes], Entry] = {}
        self._keys: dict[int, tuple[Node, bytes]] = {}  # of the published blocks
        self._last_node = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def match_prefix(self, tokens: "array[int]", root: str) -> list[Entry]:
        """Return the published blocks that hold the beginning of `tokens`, in order, up to the first missing one."""
        hits: list[Entry] = []
        size = self._block_size
        node: Node = root
        for start in range(0, len(tokens) - size + 1, size):
            entry = self._entries.get((node, tokens[start : start + size].tobytes()))
            if entry is None:
                break
            hits.append(entry)
            node = entry.node
        return hits

    def publish(self, parent: Node, tokens: "array[int]", block: int) -> int:
        """Publish `block` behind the node `parent`. Return the node to publish the next block behind.

        If the same content is published already, that stays, and `block` remains private to its holder. If another
        holder has published `block`, behind a node that this one did not see, its key stays as well.
        """
        key = self._keys.get(block) or (parent, tokens.tobytes())
        entry = self._entries.get(key)
        if entry is None:
            self._last_node += 1
            entry = self._entries[key] = Entry(block, self._last_node)
            self._keys[block] = key
        return entry.node

    def forget(self, block: int) -> None:
        """Drop a block that is about to hold something else. Nothing happens if it was not published."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._entries[key]

    def clear(self) -> None:
        """Drop all blocks. What is published behind one of them from now on cannot be reached."""
        self._entries.clear()
        self._keys.clear()

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._entries)} blocks>"

"""`PrefixIndex`: finds the blocks that hold the beginning of a prompt.

It is a trie written as a dict. The key of a block is (node of the block before it, bytes of its own tokens). That is
the content itself, with no hash that could collide, so a hit is always right. A node is a number, new for each block
that is published and never used again. Before the first block of a prompt stands a text, the *root* of its request: the
number of its adapter and its `cache_salt`. So prompts of different adapters or salts share no block, nor do those of an
adapter and of what was loaded later under its name. When a block is forgotten, blocks published behind it cannot be
reached any more; they are dropped when they are taken. The index does not know who holds a block.

There is one index of the device's blocks and a second of those in host memory, below it. A content has the same node in
both, so what is published behind a block is found wherever that block is, and after it has moved.
"""

from array import array
from typing import NamedTuple, TypeAlias

Node: TypeAlias = int | str
"""What stands before a block: a published block's number, or the root before every first block."""

Content: TypeAlias = tuple[Node, bytes]
"""The key of a block: the node before it, and its tokens."""


class Entry(NamedTuple):
    """A published block."""

    block: int
    node: int


class PrefixIndex:
    """Published blocks of `block_size` tokens each. Contents that are in the index `below` keep their nodes."""

    __slots__ = ("_below", "_block_size", "_entries", "_keys", "_last_node")

    def __init__(self, block_size: int, below: "PrefixIndex | None" = None) -> None:
        self._block_size = block_size
        self._below = below
        self._entries: dict[Content, Entry] = {}
        self._keys: dict[int, Content] = {}  # of the published blocks
        self._last_node = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def match_prefix(self, tokens: "array[int]", before: Node) -> list[Entry]:
        """Return the published blocks that hold the beginning of `tokens`, in order, up to the first missing one.

        `before` is what stands before the first of them.
        """
        hits: list[Entry] = []
        size = self._block_size
        node: Node = before
        for start in range(0, len(tokens) - size + 1, size):
            entry = self._entries.get((node, tokens[start : start + size].tobytes()))
            if entry is None:
                break
            hits.append(entry)
            node = entry.node
        return hits

    def find(self, content: Content) -> Entry | None:
        """Return the block with this content, if it is published."""
        return self._entries.get(content)

    def content(self, block: int) -> tuple[Content, int] | None:
        """Return the content of a block and its node; None if it is not published."""
        content = self._keys.get(block)
        return None if content is None else (content, self._entries[content].node)

    def publish(self, parent: Node, tokens: "array[int]", block: int) -> int:
        """Publish `block` behind the node `parent`. Return the node to publish the next block behind.

        If the same content is published already, that stays, and `block` remains private to its holder. If another
        holder has published `block`, behind a node that this one did not see, its key stays as well.
        """
        content = self._keys.get(block) or (parent, tokens.tobytes())
        entry = self._entries.get(content)
        if entry is None:
            known = self._below.find(content) if self._below is not None else None
            if known is None:
                self._last_node += 1
            entry = self._add(content, block, self._last_node if known is None else known.node)
        return entry.node

    def add(self, content: Content, block: int, node: int) -> None:
        """Publish `block`, whose content came from another index, unless that content is published already."""
        if content not in self._entries:
            self._add(content, block, node)

    def forget(self, block: int) -> tuple[Content, int] | None:
        """Drop a block that is about to hold something else. Return its content and node if it was published."""
        content = self._keys.pop(block, None)
        return None if content is None else (content, self._entries.pop(content).node)

    def clear(self) -> None:
        """Drop all blocks. What is published behind one of them from now on cannot be reached."""
        self._entries.clear()
        self._keys.clear()

    def _add(self, content: Content, block: int, node: int) -> Entry:
        entry = self._entries[content] = Entry(block, node)
        self._keys[block] = content
        return entry

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._entries)} blocks>"

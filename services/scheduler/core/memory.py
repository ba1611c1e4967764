"""`Memory`: the block tables of sequences, over the pool of blocks and the prefix index.

It owns how tables begin, grow, are shared and are given back. It does not decide who gets blocks: callers look at
`free` first. Rules that hold between any two calls:

- A block stands in as many tables as its reference count says, and a sequence keeps its table until no plan in flight
  names it. So a block with one reference is written by one sequence at most, plans in flight included.
- A row writes only blocks with one reference. Where the next position lies in a shared block, `extend` has the worker
  copy it first. The source is pinned until that plan is back, so it is not taken for something else meanwhile, and
  never the destination of a copy in the same plan. Its last holder may write to it, even in that plan: a worker copies
  before it computes.
- What is published was computed by committed steps, and is never written again: only full blocks are.
- Blocks come free from the tail of a table to its head. Published ones go to the hot end of the free list, so the
  prefix, which more requests share, outlives what follows it; others hold nothing of use and are taken next.
"""

from typing import NamedTuple

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.draft import Draft
from services.scheduler.core.prefix import ROOT, Entry, PrefixIndex
from services.scheduler.core.sequence import Sequence
from shared.protocol import TableWrite

NEVER = 1 << 62


class Claim(NamedTuple):
    """What a waiting sequence would use of the memory as it is now."""

    hits: list[Entry]  # blocks to share
    source: Entry | None  # a hit on the block of the last token, which must be computed: to be copied
    fresh: int  # blocks to take
    need: int  # blocks that the free list would lose


class Memory:
    """Tables over `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.gifts = 0  # grows whenever blocks may have come free
        self.reset(num_blocks)

    def reset(self, num_blocks: int) -> None:
        """All blocks free and nothing published; sequences must have been rewound."""
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.block_size)
        self.stored = 0  # positions handed out in held blocks, shared ones once
        self.gifts += 1

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return self.pool.free

    def survey(self, sequence: Sequence, spare: int) -> Claim:
        """What it takes to compute all known tokens of a waiting sequence and leave `spare` blocks free."""
        tokens, size = sequence.tokens, self.block_size
        total = -(-len(tokens) // size)
        hits = self.index.walk(tokens) if self.may_hit(sequence) else []
        source = hits.pop() if len(hits) * size == len(tokens) else None  # one token is always left to compute
        need = total - len(hits) + sum(self.pool.is_free(entry.block) for entry in hits)
        if source is not None and self.pool.is_free(source.block):  # pinned beside its copy
            if need + 1 + spare > self.free:
                source = None  # a full pool has no room for both: its block is computed again
            else:
                need += 1
        return Claim(hits, source, total - len(hits), need)

    def place(self, sequence: Sequence, claim: Claim, draft: Draft) -> int:
        """Give the sequence the table it claims. Returns the tokens found in the index."""
        pool, size = self.pool, self.block_size
        for entry in claim.hits:  # before any is taken, which might be one of these
            self.stored += 0 if pool.refs[entry.block] else size
            pool.share(entry.block)
        if claim.source is not None:
            pool.pin(claim.source.block)
        sequence.blocks = [entry.block for entry in claim.hits] + [self._take() for _ in range(claim.fresh)]
        found = len(claim.hits) * size
        sequence.chain = claim.hits[-1].serial if claim.hits else ROOT
        sequence.next_full = found + size if self.prefix_caching else NEVER
        if claim.source is not None:
            draft.copies.append((claim.source.block, sequence.blocks[-1]))
            self.stored += size - 1
            found += size - 1
        sequence.computed = sequence.planned = found
        sequence.room = len(sequence.blocks) * size
        return found

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child gets all blocks of the parent, which has just been handed its last known position."""
        for block in parent.blocks:
            self.pool.share(block)
        child.blocks = list(parent.blocks)
        child.chain, child.next_full = parent.chain, parent.next_full
        child.planned, child.known = parent.planned, parent.known
        parent.room = child.room = parent.planned // self.block_size * self.block_size  # not into the shared block

    def must_take(self, sequence: Sequence) -> bool:
        """Whether the next position, which lies beyond `room`, needs a block from the free list."""
        index = sequence.planned // self.block_size
        return index == len(sequence.blocks) or self.pool.refs[sequence.blocks[index]] > 1

    def extend(self, sequence: Sequence, draft: Draft) -> None:
        """Make room for the next position: a new block, or the one it shares made its own."""
        index = sequence.planned // self.block_size
        if index == len(sequence.blocks):
            self._write(sequence, index, draft)
        elif self.pool.refs[sequence.blocks[index]] > 1:
            source = sequence.blocks[index]
            self.pool.pin(source)
            self.pool.give(source, keep=False)
            draft.copies.append((source, self._write(sequence, index, draft)))
            self.stored += sequence.planned % self.block_size
        sequence.room = len(sequence.blocks) * self.block_size

    def publish(self, sequence: Sequence) -> None:
        """Publish the blocks that commits have filled since the last call."""
        size = self.block_size
        while sequence.next_full <= sequence.computed:
            start = sequence.next_full - size
            content = sequence.tokens[start : sequence.next_full]
            sequence.chain = self.index.publish(sequence.chain, content, sequence.blocks[start // size])
            sequence.next_full += size

    def exclusive(self, sequence: Sequence) -> int:
        """Blocks that would come free if it gave its table back."""
        refs = self.pool.refs
        return sum(refs[block] == 1 for block in sequence.blocks)

    def release(self, sequence: Sequence) -> None:
        """Take the table back; no plan in flight may name the sequence."""
        filled = sequence.planned - (len(sequence.blocks) - 1) * self.block_size  # positions in the last block
        for block in reversed(sequence.blocks):
            if self.pool.refs[block] == 1:
                self.stored -= min(max(filled, 0), self.block_size)
            self.pool.give(block, keep=block in self.index)
            filled += self.block_size
        sequence.blocks = []
        self.gifts += 1

    def unpin(self, blocks: list[int]) -> None:
        """The plan that copied from them is back."""
        for block in blocks:
            self.pool.unpin(block, keep=block in self.index)
            self.gifts += 1

    def may_hit(self, sequence: Sequence) -> bool:
        """Whether it takes prefix hits at all: scores of the prompt come from computing it."""
        return self.prefix_caching and sequence.sampling.prompt_logprobs < 0

    def _take(self) -> int:
        block = self.pool.take()
        self.index.forget(block)
        return block

    def _write(self, sequence: Sequence, index: int, draft: Draft) -> int:
        block = self._take()
        sequence.blocks[index : index + 1] = [block]
        draft.writes.append(TableWrite(sequence.slot, index, [block]))
        return block

    def __repr__(self) -> str:
        return f"<Memory {self.pool!r} {self.index!r} {self.stored} stored>"

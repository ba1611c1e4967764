"""`BlockManager`: the block tables of sequences, over the pool of blocks and the prefix index.

It owns how tables begin, grow, are shared and are given back. It does not decide who gets blocks: callers look at
`num_free` first. Rules that hold between any two calls:

- A block stands in as many tables as its reference count says, and a sequence keeps its table until no plan in flight
  names it. So at most one sequence writes to a block with one reference, plans in flight included.
- A row writes only blocks with one reference. Where the next position lies in a shared block, `extend` has the worker
  copy it first. The source is pinned until the result of that plan is back, so that nobody else takes it meanwhile and
  it is never the destination of a copy in the same plan. A holder that is left alone with the source may write to it,
  even in that plan, since a worker copies before it computes.
- Only full blocks that committed steps have computed are published. Nobody writes to them again.
- A table frees its blocks from tail to head. Published ones go to the hot end of the free list, so that the beginning
  of a prompt, which more requests share, is evicted after what follows it. The others are of no use and are taken next.
"""

from collections.abc import Iterable
from typing import NamedTuple

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.plan_builder import PlanBuilder
from services.scheduler.core.prefix import Entry, PrefixIndex
from services.scheduler.core.sequence import Sequence

NEVER = 1 << 62
"""A position that no sequence reaches."""


class Allocation(NamedTuple):
    """The blocks that a waiting sequence would get at this moment."""

    hits: list[Entry]  # blocks to share
    copied: Entry | None  # a hit on the block of the last token: copied, because that token must be computed
    num_new: int  # blocks to take
    num_free_needed: int  # blocks that the free list would lose


class BlockManager:
    """Tables over `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.free_version = 0  # grows whenever blocks may have come free
        self.reset(num_blocks)

    def reset(self, num_blocks: int) -> None:
        """Make all blocks free and publish none. All tables must have been released."""
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.block_size)
        self.tokens_held = 0  # positions scheduled in held blocks, each shared one counted once
        self.blocks_pending_free = 0  # blocks that stopping sequences will give back
        self.free_version += 1

    @property
    def num_free(self) -> int:
        """The number of blocks that can be taken now."""
        return self.pool.num_free

    def match_prefix(self, sequence: Sequence, spare: int) -> Allocation:
        """Return what it takes to compute all tokens of a waiting sequence and leave `spare` blocks free."""
        tokens, size = sequence.tokens, self.block_size
        hits = self.index.match_prefix(tokens, sequence.request.prefix_root) if self.may_hit(sequence) else []
        copied = hits.pop() if len(hits) * size == len(tokens) else None  # one token is always left to compute
        num_new = -(-len(tokens) // size) - len(hits)
        num_free_needed = num_new + sum(self.pool.is_free(entry.block) for entry in hits)
        if copied is not None and self.pool.is_free(copied.block):  # the copy and its pinned source are held at once
            if num_free_needed + 1 + spare > self.num_free:
                copied = None  # there is no room for both, so the block is computed again
            else:
                num_free_needed += 1
        return Allocation(hits, copied, num_new, num_free_needed)

    def allocate(self, sequence: Sequence, allocation: Allocation, builder: PlanBuilder) -> int:
        """Give a sequence its table. Return the number of tokens that its blocks hold already."""
        pool, size = self.pool, self.block_size
        for entry in allocation.hits:  # before `_take`, which might take one of these
            self.tokens_held += 0 if pool.refs[entry.block] else size
            pool.share(entry.block)
        if allocation.copied is not None:
            pool.pin(allocation.copied.block)
        table = sequence.table
        table.blocks = [entry.block for entry in allocation.hits] + [self._take() for _ in range(allocation.num_new)]
        num_cached = len(allocation.hits) * size
        table.last_node = allocation.hits[-1].node if allocation.hits else sequence.request.prefix_root
        table.publish_at = num_cached + size if self.prefix_caching else NEVER
        if allocation.copied is not None:
            builder.copy_block(allocation.copied.block, table.blocks[-1])
            self.tokens_held += size - 1
            num_cached += size - 1
        table.num_writable = len(table.blocks) * size
        return num_cached

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share with the child all blocks of the parent, whose last position has just been scheduled."""
        for block in parent.table.blocks:
            self.pool.share(block)
        child.table.blocks = list(parent.table.blocks)
        child.table.last_node, child.table.publish_at = parent.table.last_node, parent.table.publish_at
        full = parent.progress.num_scheduled // self.block_size * self.block_size  # positions in full blocks
        parent.table.num_writable = child.table.num_writable = full  # a last block that is not full is shared now

    def needs_block(self, sequence: Sequence) -> bool:
        """Return whether the next position, which is not writable yet, needs a block from the free list."""
        index = sequence.progress.num_scheduled // self.block_size
        blocks = sequence.table.blocks
        return index == len(blocks) or self.pool.refs[blocks[index]] > 1

    def extend(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Make the next position writable: append a block, or replace a shared one by a copy."""
        position, table = sequence.progress.num_scheduled, sequence.table
        index = position // self.block_size
        if index == len(table.blocks):
            self._put_new_block(sequence, index, builder)
        elif self.pool.refs[table.blocks[index]] > 1:
            source = table.blocks[index]
            self.pool.pin(source)
            self.pool.release(source, keep=False)
            builder.copy_block(source, self._put_new_block(sequence, index, builder))
            self.tokens_held += position % self.block_size
        table.num_writable = len(table.blocks) * self.block_size

    def count_scheduled(self, num_tokens: int) -> None:
        """Note that a plan schedules `num_tokens` positions, all in blocks that are held."""
        self.tokens_held += num_tokens

    def publish(self, sequence: Sequence) -> None:
        """Publish the blocks that commits have filled since the last call."""
        size, table = self.block_size, sequence.table
        while table.publish_at <= sequence.progress.num_computed:
            start = table.publish_at - size
            content = sequence.tokens[start : table.publish_at]
            table.last_node = self.index.publish(table.last_node, content, table.blocks[start // size])
            table.publish_at += size

    def reset_prefix_cache(self, holders: Iterable[Sequence]) -> None:
        """Forget all published blocks. What `holders`, all sequences with tables, have computed is never published."""
        self.index.clear()
        for sequence in holders:
            sequence.table.publish_at = NEVER

    def num_exclusive(self, sequence: Sequence) -> int:
        """Return how many blocks would come free if the sequence gave its table back."""
        refs = self.pool.refs
        return sum(refs[block] == 1 for block in sequence.table.blocks)

    def expect_release(self, sequence: Sequence) -> None:
        """Count the blocks that the sequence will free as soon as no plan in flight names it."""
        sequence.table.num_pending_free = self.num_exclusive(sequence)
        self.blocks_pending_free += sequence.table.num_pending_free

    def release(self, sequence: Sequence) -> None:
        """Take the table back. No plan in flight may name the sequence."""
        table = sequence.table
        filled = sequence.progress.num_scheduled - (len(table.blocks) - 1) * self.block_size  # in the last block
        for block in reversed(table.blocks):
            if self.pool.refs[block] == 1:
                self.tokens_held -= min(max(filled, 0), self.block_size)
            self.pool.release(block, keep=block in self.index)
            filled += self.block_size
        self.blocks_pending_free -= table.num_pending_free
        table.clear()
        self.free_version += 1

    def unpin(self, blocks: list[int]) -> None:
        """Unpin the blocks that a plan copied from, now that its result is back."""
        for block in blocks:
            self.pool.unpin(block, keep=block in self.index)
            self.free_version += 1

    def may_hit(self, sequence: Sequence) -> bool:
        """Return whether a sequence takes prefix hits: a prompt with log-probabilities has to be computed for them."""
        return self.prefix_caching and sequence.sampling.prompt_logprobs < 0

    def _take(self) -> int:
        block = self.pool.take()
        self.index.forget(block)
        return block

    def _put_new_block(self, sequence: Sequence, index: int, builder: PlanBuilder) -> int:
        block = self._take()
        sequence.table.blocks[index : index + 1] = [block]
        builder.write_table(sequence.slot, index, block)
        return block

    def __repr__(self) -> str:
        return f"<BlockManager {self.pool!r} {self.index!r} {self.tokens_held} tokens held>"

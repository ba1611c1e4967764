"""`BlockManager`: the block tables of sequences, over the pool of blocks, the prefix index and host memory.

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
- A block that is copied back from host memory holds its content before any row of the same plan is computed, so it is
  published at once. But a plan copies its blocks before that, so it never copies one that it brings back.
- A swapped sequence waits with host blocks (host_tier.py). When it is admitted, the beginning of it may still be, or be
  again, in published blocks of the device; the rest is copied back.
"""

from collections.abc import Iterable
from typing import NamedTuple

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.host_tier import HostTier
from services.scheduler.core.plan_builder import PlanBuilder
from services.scheduler.core.prefix import Content, Entry, Node, PrefixIndex
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.swap_policy import SwapPolicy

NEVER = 1 << 62
"""A position that no sequence reaches."""


class Allocation(NamedTuple):
    """The blocks that a waiting sequence would get at this moment."""

    resumes: bool  # what a swapped sequence had computed
    hits: list[Entry]  # blocks to share
    copied: Entry | None  # a hit on the block of the last token: copied, because that token must be computed
    host_blocks: list[int]  # to copy back behind the hits
    num_cached: int  # tokens that the table's blocks will hold
    num_new: int  # blocks to take
    num_free_needed: int  # blocks that the free list would lose

    def num_from_host(self, block_size: int) -> int:
        """Return how many of the tokens come from host memory."""
        return self.num_cached - len(self.hits) * block_size if self.host_blocks else 0


class BlockManager:
    """Tables over `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool, swap_policy: SwapPolicy) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.free_version = 0  # grows whenever blocks may have come free
        self._swap_policy = swap_policy
        self.reset(num_blocks, 0)

    def reset(self, num_blocks: int, num_host_blocks: int) -> None:
        """Make all blocks free and publish none. All tables must have been released."""
        self.pool = BlockPool(num_blocks)
        self.host_tier = HostTier(num_host_blocks, self.block_size)
        self.index = PrefixIndex(self.block_size, self.host_tier.index)
        self.num_swapped = 0  # sequences with host blocks
        self.tokens_held = 0  # positions scheduled in held blocks, each shared one counted once
        self.blocks_pending_free = 0  # blocks that stopping sequences will give back
        self.free_version += 1

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of blocks and of host blocks."""
        return self.pool.num_blocks, self.host_tier.pool.num_blocks

    @property
    def num_free(self) -> int:
        """The number of blocks that can be taken now."""
        return self.pool.num_free

    def match_prefix(self, sequence: Sequence, spare: int) -> Allocation:
        """Return what it takes to compute all tokens of a waiting sequence and leave `spare` blocks free."""
        tokens, size = sequence.tokens, self.block_size
        resumes = self._can_resume(sequence)
        if resumes:
            num_cached = sequence.table.num_in_host
            hits = self.index.match_prefix(tokens[:num_cached], sequence.request.prefix_root)
            host_blocks, copied = sequence.table.host_blocks[len(hits) :], None
        else:
            hits, host_blocks = self._find_prefix(sequence)
            num_cached = min((len(hits) + len(host_blocks)) * size, len(tokens) - 1)
            # one token is always left to compute
            copied = hits.pop() if len(hits) * size > num_cached else None
            if copied is not None and (host_block := self.host_tier.incoming(copied.block)) is not None:
                copied, host_blocks = None, [host_block]
        num_new = -(-len(tokens) // size) - len(hits)
        num_free_needed = num_new + sum(self.pool.is_free(entry.block) for entry in hits)
        if copied is not None and self.pool.is_free(copied.block):  # the copy and its pinned source are held at once
            if num_free_needed + 1 + spare > self.num_free:
                copied = None  # there is no room for both, so the block is computed again
                num_cached = len(hits) * size
            else:
                num_free_needed += 1
        return Allocation(resumes, hits, copied, host_blocks, num_cached, num_new, num_free_needed)

    def is_leaving(self, sequence: Sequence) -> bool:
        """Return whether a plan in flight copies blocks of a waiting sequence to host memory."""
        return any(map(self.host_tier.is_written, sequence.table.host_blocks))

    def allocate(self, sequence: Sequence, allocation: Allocation, builder: PlanBuilder) -> None:
        """Give a sequence its table, whose blocks hold `allocation.num_cached` tokens already."""
        pool, size, table = self.pool, self.block_size, sequence.table
        for entry in allocation.hits:  # before `_take`, which might take one of these
            self.tokens_held += 0 if pool.refs[entry.block] else size
            pool.share(entry.block)
        if allocation.copied is not None:
            pool.pin(allocation.copied.block)
        for host_block in allocation.host_blocks:  # before `_take` as well, which might reuse one of these
            self.host_tier.pin(host_block)
        table.blocks = [entry.block for entry in allocation.hits] + [self._take() for _ in range(allocation.num_new)]
        if not allocation.resumes:
            table.last_node = allocation.hits[-1].node if allocation.hits else sequence.request.prefix_root
            table.publish_at = len(allocation.hits) * size + size if self.prefix_caching else NEVER
        self._copy_in(sequence, allocation)
        self.drop_host_blocks(sequence)
        if allocation.copied is not None:
            builder.copy_block(allocation.copied.block, table.blocks[-1])
        self.tokens_held += allocation.num_cached - len(allocation.hits) * size
        table.num_writable = len(table.blocks) * size

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
        """Forget all published blocks. What `holders`, all sequences with tables, have computed is never published.

        A swapped sequence is one of them. It goes on with what it has, as one that runs does.
        """
        self.index.clear()
        self.host_tier.index.clear()
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
        self._release_blocks(sequence)
        sequence.table.clear()

    def _release_blocks(self, sequence: Sequence) -> None:
        table = sequence.table
        filled = sequence.progress.num_scheduled - (len(table.blocks) - 1) * self.block_size  # in the last block
        for block in reversed(table.blocks):
            if self.pool.refs[block] == 1:
                self.tokens_held -= min(max(filled, 0), self.block_size)
            self.pool.release(block, keep=block in self.index)
            filled += self.block_size
        self.blocks_pending_free -= table.num_pending_free
        self.free_version += 1

    def swap_out(self, sequence: Sequence) -> bool:
        """Take the table back, and have the next plan copy what is computed to host memory.

        Return False, and do nothing, if that is not worth it, or there is no room. No plan in flight may name the
        sequence.
        """
        num_tokens = sequence.progress.num_computed
        blocks = sequence.table.blocks[: -(-num_tokens // self.block_size)]
        if not blocks or not self._swap_policy.swaps(len(blocks), num_tokens):
            return False
        host_blocks = self.host_tier.hold(blocks, self._published_contents(sequence, num_tokens))
        if host_blocks is None:
            return False
        self._release_blocks(sequence)
        sequence.table.swap(host_blocks, num_tokens)
        self.num_swapped += 1
        return True

    def drop_host_blocks(self, sequence: Sequence) -> None:
        """Have a sequence hold no host blocks, if it is swapped."""
        table = sequence.table
        if table.host_blocks:
            self.host_tier.release(table.host_blocks)
            table.host_blocks, table.num_in_host = [], 0
            self.num_swapped -= 1

    def unpin(self, blocks: list[int], host_blocks: list[int]) -> None:
        """Unpin the blocks that a plan copied from, and the host blocks of its moves, now that its result is back."""
        self.host_tier.unpin(host_blocks)
        for block in blocks:
            self.pool.unpin(block, keep=block in self.index)
            self.free_version += 1

    def may_hit(self, sequence: Sequence) -> bool:
        """Return whether a sequence takes prefix hits: a prompt with log-probabilities has to be computed for them."""
        return self.prefix_caching and sequence.sampling.prompt_logprobs < 0

    def _take(self) -> int:
        block = self.pool.take()
        published = self.index.forget(block)
        if published is not None and self.host_tier.pool.num_blocks and self._swap_policy.keeps:
            self.host_tier.keep(*published, block)
        return block

    def _find_prefix(self, sequence: Sequence) -> tuple[list[Entry], list[int]]:
        """Return the published blocks that hold the beginning of a sequence, and the host blocks that go on with it."""
        if not self.may_hit(sequence):
            return [], []
        tokens, root = sequence.tokens, sequence.request.prefix_root
        hits = self.index.match_prefix(tokens, root)
        if not self.host_tier.index:
            return hits, []
        before: Node = hits[-1].node if hits else root
        in_host = self.host_tier.match_prefix(tokens[len(hits) * self.block_size :], before)
        return hits, [entry.block for entry in in_host]

    def _can_resume(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence is swapped, and can be copied back by the next plan.

        If its blocks are still to be copied to host memory by that plan, it cannot. Then it is admitted like one that
        is not swapped, since nobody may wait for a plan that might not come.
        """
        host_blocks = sequence.table.host_blocks
        return bool(host_blocks) and all(map(self.host_tier.can_read, host_blocks))

    def _copy_in(self, sequence: Sequence, allocation: Allocation) -> None:
        """Copy host blocks back into a new table, and publish those that are full and are published in host memory."""
        table, index = sequence.table, len(allocation.hits)
        for host_block in allocation.host_blocks:
            block = table.blocks[index]
            self.host_tier.copy_in(host_block, block)
            index += 1
            published = self.host_tier.index.content(host_block)
            if published is not None and index * self.block_size <= allocation.num_cached:
                self.index.add(published[0], block, published[1])
                if not allocation.resumes:  # a swapped one publishes where it would have
                    table.last_node = published[1]
                    table.publish_at += self.block_size

    def _published_contents(self, sequence: Sequence, num_tokens: int) -> list[tuple[Content, int]]:
        """Return the contents of the first blocks of a sequence, with their nodes, as far as they are published.

        After a reset there are none: blocks with the same content may be published, but these are older.
        """
        contents: list[tuple[Content, int]] = []
        if sequence.table.publish_at == NEVER:
            return contents
        node: Node = sequence.request.prefix_root
        for start in range(0, num_tokens - self.block_size + 1, self.block_size):
            content = (node, sequence.tokens[start : start + self.block_size].tobytes())
            entry = self.index.find(content) or self.host_tier.index.find(content)
            if entry is None:
                break
            contents.append((content, entry.node))
            node = entry.node
        return contents

    def _put_new_block(self, sequence: Sequence, index: int, builder: PlanBuilder) -> int:
        block = self._take()
        sequence.table.blocks[index : index + 1] = [block]
        builder.write_table(sequence.slot, index, block)
        return block

    def __repr__(self) -> str:
        return f"<BlockManager {self.pool!r} {self.index!r} {self.tokens_held} tokens held>"

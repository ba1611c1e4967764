"""`Router`: chooses an engine for each request. It is pure: no sockets, no clock, no randomness.

The rule of `cache_aware`: an engine shares its time among its sequences, so a request takes about its own work times
the number of sequences there, itself included. Its work is what has to be computed: the tokens of its prompt that are
not in the engine's prefix cache, and its output. The request goes where the product is least. So it goes where the
longest prefix of it is cached, unless that engine is too busy: with a prompt of P tokens of which C are cached, it may
have at most (P + OUTPUT) / (P - C + OUTPUT) times the sequences of an engine that has cached nothing. Where nothing is
cached, or the same everywhere, the load alone decides.

Engines do not say what they have cached. A gateway knows what an engine has computed for it and how many blocks the
engine has, so it keeps that many for each, up to a bound, those used last. It forgets them with the worker whose memory
they were in. A wrong guess, as when other gateways' requests have taken the blocks, only costs time.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

from shared.protocol import Sampling, Status, Welcome

RoutingPolicy = Literal["cache_aware", "least_loaded", "round_robin"]

OUTPUT = 100
"""Output tokens that a request is assumed to have. Nobody knows the number: `max_tokens` is mostly far above it.

It bounds the ratio of loads that a prefix is worth. With 50 or 200 there is little difference (benchmarks/results).
"""

MAX_BLOCKS = 100_000
"""Blocks that are remembered of one engine: 15 MB, and 1.6 million tokens in blocks of 16."""


class RoutedEngine(Protocol):
    """An engine, as a gateway's connection shows it."""

    welcome: Welcome | None
    status: Status | None

    @property
    def load(self) -> int: ...


E = TypeVar("E", bound=RoutedEngine)


def hash_blocks(tokens: "array[int]", block_size: int, parent: int = 0) -> list[int]:
    """Return a hash for each full block of int32 `tokens`, which depends on all tokens up to its end.

    `parent` is the hash of the block before them, or of the `cache_salt` before the first. Python's own hash is the
    fastest, and good enough: where two prefixes have the same hash, a choice is wrong, and without its secret key
    nobody can make such prefixes.
    """
    data, width = tokens.tobytes(), block_size * tokens.itemsize
    hashes = []
    for start in range(0, len(data) - width + 1, width):
        parent = hash((parent, data[start : start + width]))
        hashes.append(parent)
    return hashes


class CachedBlocks:
    """The hashes of the blocks that an engine has probably cached: the `capacity` ones that were used last.

    If a block is among them, so are all that come before it in its prompt, since those are used after it.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self.block_size = block_size  # tokens
        self._capacity = capacity
        self._hashes: OrderedDict[int, None] = OrderedDict()  # the one that was used longest ago comes first

    def __len__(self) -> int:
        return len(self._hashes)

    def match_prefix(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are cached."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hashes[middle] in self._hashes else (low, middle)
        return low

    def use(self, hashes: Sequence[int]) -> None:
        """Note that a sequence has used these blocks. If it has others before them, those must be noted next."""
        for block in reversed(hashes):  # an engine frees the last one first
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)


class Router:
    """Chooses engines by a policy, and keeps what it needs to know for that. Engines that are gone are forgotten."""

    def __init__(self, policy: RoutingPolicy = "cache_aware") -> None:
        self._policy = policy
        self._caches: WeakKeyDictionary[RoutedEngine, tuple[tuple[str, int, int], CachedBlocks]] = WeakKeyDictionary()
        self._num_chosen = 0

    def choose(self, engines: Sequence[E], prompt: "array[int]", sampling: Sampling, root: str = "") -> E:
        """Return one of `engines`, of which there is at least one, for a request. `root` is its `cache_root`."""
        self._num_chosen += 1
        if self._policy == "round_robin":
            return engines[self._num_chosen % len(engines)]
        takes_hits = sampling.prompt_logprobs < 0 and len(engines) > 1  # otherwise it would make no difference
        hashes = cache(lambda block_size: hash_blocks(prompt, block_size, hash(root)))

        def cost(engine: E) -> tuple[int, int, int]:
            blocks, num_cached = self._cached_blocks(engine), 0
            if takes_hits and blocks:
                num_cached = blocks.match_prefix(hashes(blocks.block_size)) * blocks.block_size
            return (engine.load + 1) * (len(prompt) - num_cached + OUTPUT), engine.load, len(blocks)

        return min(engines, key=cost)  # the first one, if they are equal in all three

    def note(self, engine: RoutedEngine, prompt: "array[int]", outputs: Iterable["array[int]"], root: str = "") -> None:
        """Note that an engine has computed outputs of a prompt: all their tokens but the last."""
        blocks = self._cached_blocks(engine)
        if self._policy != "cache_aware" or not blocks.block_size:
            return
        if not (computed := [output for output in outputs if output]):
            return
        hashes = hash_blocks(prompt, blocks.block_size, hash(root))
        rest, parent = prompt[len(hashes) * blocks.block_size :], hashes[-1] if hashes else hash(root)
        for output in computed:
            blocks.use(hash_blocks(rest + output[:-1], blocks.block_size, parent))
        blocks.use(hashes)  # once for all outputs, since there may be a thousand, and last: an engine frees it last

    def _cached_blocks(self, engine: RoutedEngine) -> CachedBlocks:
        """Return what is cached at an engine: nothing yet, if its scheduler or worker is another one than before, or
        its cache was reset.
        """
        welcome, status = engine.welcome, engine.status
        if welcome is None or status is None or not status.snapshot.prefix_caching:
            return NO_CACHE
        snapshot = status.snapshot
        incarnation = (welcome.boot_id, snapshot.worker_losses, snapshot.prefix_resets)
        known, blocks = self._caches.get(engine, (None, NO_CACHE))
        if known != incarnation:
            blocks = CachedBlocks(min(snapshot.blocks + snapshot.host_blocks, MAX_BLOCKS), snapshot.block_size)
            self._caches[engine] = (incarnation, blocks)
        return blocks


NO_CACHE = CachedBlocks(0, 0)

"""Tests of `Router`: which engine it chooses, by cached prefixes and load, and what it knows to be cached."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.gateway import routing
from services.gateway.routing import OUTPUT, CachedBlocks, Router, RoutingPolicy, hash_blocks
from shared.protocol import VERSION, ModelInfo, Sampling, Snapshot, Status, Welcome

BLOCK = 4
PROMPT = array("i", range(400))
ANSWER = array("i", range(1000, 1041))
GREEDY = Sampling(max_tokens=9, seed=0)


class FakeEngine:
    """An engine of a given load, which has a prefix cache of 1000 blocks unless the snapshot says otherwise."""

    def __init__(self, load: int = 0, boot_id: str = "1", **snapshot: object) -> None:
        self.load = load
        self.welcome: Welcome | None = None
        self.status: Status | None = None
        self.show(boot_id, **snapshot)

    def show(self, boot_id: str = "1", **snapshot: object) -> None:
        """Let the engine's scheduler and status be these."""
        shown = replace(Snapshot(blocks=1000, block_size=BLOCK, prefix_caching=True), **snapshot)
        self.welcome = Welcome(VERSION, "", boot_id, ModelInfo("", "", "", 0, 0, ""), 1000, 8)
        self.status = Status(True, False, shown)


def chosen(
    router: Router,
    engines: list[FakeEngine],
    prompt: "array[int]" = PROMPT,
    sampling: Sampling = GREEDY,
    salt: str = "",
) -> int:
    """Return the index of the chosen engine."""
    return engines.index(router.choose(engines, prompt, sampling, salt))


def test_the_longest_cached_prefix_wins() -> None:
    router, engines = Router(), [FakeEngine(), FakeEngine(), FakeEngine()]
    for engine, length in zip(engines, (0, 80, 40), strict=True):
        router.note(engine, PROMPT[:length] + array("i", [7] * 40), [ANSWER])
    assert chosen(router, engines) == 1
    assert chosen(router, engines, PROMPT[:40]) == 2, "two have all of it, and this one's cache is emptier"
    assert chosen(router, engines, PROMPT[:40] + array("i", [7] * 9)) == 2


def test_a_busy_engine_is_left_when_its_prefix_is_not_worth_it() -> None:
    """The bound is the ratio of the work that a request is, without the prefix and with it."""
    router, engines = Router(), [FakeEngine(), FakeEngine()]
    router.note(engines[0], PROMPT, [ANSWER])
    router.note(engines[1], ANSWER + PROMPT, [ANSWER])  # so that its cache is not the emptier one
    bound = (len(PROMPT) + OUTPUT) // OUTPUT  # all of the prompt is cached
    for least in (0, 10):
        engines[1].load = least
        engines[0].load = bound * (least + 1) - 2
        assert chosen(router, engines) == 0
        engines[0].load += 1
        assert chosen(router, engines) == 1, "equal work, and more sequences"


def test_load_decides_where_nothing_is_cached_or_the_same() -> None:
    router, engines = Router(), [FakeEngine(3), FakeEngine(2), FakeEngine(2)]
    assert chosen(router, engines) == 1
    for engine in engines:
        router.note(engine, PROMPT, [ANSWER])
    assert chosen(router, engines) == 1
    router.note(engines[1], ANSWER, [ANSWER])
    assert chosen(router, engines) == 2, "its cache is emptier"


def test_the_next_turn_of_a_chat_finds_the_output_of_the_last_one() -> None:
    router, engines = Router(), [FakeEngine(), FakeEngine()]
    router.note(engines[0], PROMPT, [])
    router.note(engines[1], PROMPT, [ANSWER[:1], ANSWER])
    router.note(engines[0], PROMPT, [ANSWER[:1]])
    assert chosen(router, engines, PROMPT + ANSWER) == 1


def test_a_prompt_is_noted_once_for_all_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a hundred thousand tokens, and a thousand outputs."""
    used: list[int] = []
    use = CachedBlocks.use
    monkeypatch.setattr(CachedBlocks, "use", lambda self, hashes: (used.append(len(hashes)), use(self, hashes)))
    router, engine = Router(), FakeEngine()
    router.note(engine, PROMPT[:10], [ANSWER[:7], ANSWER[:0], ANSWER[1:12]])
    assert used == [2, 3, 2], "blocks of 2 and 6 tokens, of 2 and 10, and of the prompt"


def test_outputs_are_forgotten_before_their_prompt() -> None:
    router, engine = Router(), FakeEngine(blocks=4)
    router.note(engine, PROMPT[:8], [ANSWER, ANSWER[1:]])
    blocks = router._cached_blocks(engine)
    assert (len(blocks), blocks.match_prefix(hash_blocks(PROMPT[:8] + ANSWER[1:], BLOCK))) == (4, 4)


def test_the_blocks_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_BLOCKS", 7)
    router, engine = Router(), FakeEngine(blocks=1 << 30)
    router.note(engine, PROMPT, [ANSWER])
    assert len(router._cached_blocks(engine)) == 7


def test_an_engine_keeps_blocks_in_host_memory_too() -> None:
    router, engine = Router(), FakeEngine(blocks=1, host_blocks=2)
    router.note(engine, PROMPT, [ANSWER])
    assert len(router._cached_blocks(engine)) == 3


def test_a_prompt_without_output_is_not_cached() -> None:
    """The client has left before an engine computed it."""
    router, engines = Router(), [FakeEngine(1), FakeEngine()]
    router.note(engines[0], PROMPT, [array("i"), array("i")])
    assert chosen(router, engines) == 1


def test_the_last_token_of_an_output_is_not_cached() -> None:
    """It is sampled, and never computed."""
    router, engines = Router(), [FakeEngine(), FakeEngine(0)]
    router.note(engines[0], PROMPT[:5], [ANSWER[: 4 - 1]])  # tokens 0 to 6 are computed: one block
    router.note(engines[1], PROMPT[:5], [ANSWER[:4]])  # and here two
    assert chosen(router, engines, PROMPT[:5] + ANSWER[:9]) == 1


def test_requests_of_different_salts_share_no_prefix() -> None:
    router, engines = Router(), [FakeEngine(1), FakeEngine(1), FakeEngine()]
    router.note(engines[0], PROMPT, [ANSWER])
    router.note(engines[1], PROMPT, [ANSWER], "a")
    assert chosen(router, engines) == 0
    assert chosen(router, engines, salt="a") == 1
    assert chosen(router, engines, salt="b") == 2
    assert chosen(router, engines, PROMPT[:BLOCK] + ANSWER, salt="a") == 2, "a short prefix is not worth it"


def test_an_output_behind_a_prompt_that_fills_no_block_has_its_salt_too() -> None:
    router, engines = Router(), [FakeEngine(), FakeEngine()]
    short, other = PROMPT[: BLOCK - 1], PROMPT[BLOCK : 2 * BLOCK - 1]
    router.note(engines[0], other, [ANSWER], "a")  # so that neither cache is the emptier one
    router.note(engines[1], short, [ANSWER], "a")
    assert chosen(router, engines, short + ANSWER, salt="a") == 1
    assert chosen(router, engines, short + ANSWER) == 0


@pytest.mark.parametrize(
    ("boot_id", "changes"),
    [("2", {}), ("1", {"worker_losses": 1}), ("1", {"prefix_resets": 1})],
    ids=["scheduler", "worker", "reset"],
)
def test_what_was_cached_is_forgotten_with_scheduler_worker_and_reset(boot_id: str, changes: dict[str, int]) -> None:
    router, engines = Router(), [FakeEngine(1), FakeEngine()]
    router.note(engines[0], PROMPT, [ANSWER])
    assert chosen(router, engines) == 0
    engines[0].show(boot_id, **changes)
    assert chosen(router, engines) == 1


def test_an_engine_that_is_away_for_a_moment_keeps_its_cache() -> None:
    router, engines = Router(), [FakeEngine(1), FakeEngine()]
    router.note(engines[0], PROMPT, [ANSWER])
    engines[0].welcome = engines[0].status = None
    assert chosen(router, engines) == 1
    router.note(engines[0], PROMPT, [ANSWER])
    engines[0].show()
    assert chosen(router, engines) == 0


@pytest.mark.parametrize(
    ("policy", "sampling", "caching"),
    [
        ("least_loaded", GREEDY, True),
        ("cache_aware", replace(GREEDY, prompt_logprobs=0), True),
        ("cache_aware", GREEDY, False),
    ],
    ids=["least_loaded", "the prompt is scored", "no prefix cache"],
)
def test_load_alone_decides(policy: RoutingPolicy, sampling: Sampling, caching: bool) -> None:
    router, engines = Router(policy), [FakeEngine(1, prefix_caching=caching), FakeEngine(0, prefix_caching=caching)]
    router.note(engines[0], PROMPT, [ANSWER])
    assert chosen(router, engines, sampling=sampling) == 1


def test_round_robin_takes_turns() -> None:
    router, engines = Router("round_robin"), [FakeEngine(5), FakeEngine(), FakeEngine()]
    turns = [chosen(router, engines) for _ in range(6)]
    assert sorted(turns[:3]) == [0, 1, 2]
    assert turns[3:] == turns[:3]


def test_engines_may_have_blocks_of_different_sizes() -> None:
    router, engines = Router(), [FakeEngine(), FakeEngine(block_size=16)]
    router.note(engines[0], PROMPT[:15], [ANSWER[:1]])
    router.note(engines[1], PROMPT[:15], [ANSWER[:1]])
    assert chosen(router, engines) == 0, "the other one has no full block"


def test_an_engine_that_is_gone_is_forgotten() -> None:
    router, engine = Router(), FakeEngine()
    router.note(engine, PROMPT, [ANSWER])
    assert len(router._caches) == 1
    del engine
    assert len(router._caches) == 0


Tokens = st.lists(st.integers(0, 2), max_size=24).map(lambda tokens: array("i", tokens))


@given(Tokens, Tokens)
def test_hashes_of_a_sequence_go_on_from_those_of_its_beginning(tokens: "array[int]", more: "array[int]") -> None:
    begun = hash_blocks(tokens, BLOCK)
    rest = tokens[len(begun) * BLOCK :] + more
    assert hash_blocks(tokens + more, BLOCK) == begun + hash_blocks(rest, BLOCK, begun[-1] if begun else 0)


@given(Tokens, Tokens)
def test_blocks_have_the_same_hash_if_all_tokens_up_to_their_end_are_the_same(
    first: "array[int]", second: "array[int]"
) -> None:
    pairs = zip(hash_blocks(first, BLOCK), hash_blocks(second, BLOCK), strict=False)
    for count, (one, other) in enumerate(pairs, 1):
        assert (one == other) == (first[: count * BLOCK] == second[: count * BLOCK])


@given(st.lists(Tokens, max_size=8), Tokens, st.integers(0, 12))
def test_cached_blocks_are_whole_beginnings_of_the_last_sequences(
    used: list["array[int]"], prompt: "array[int]", capacity: int
) -> None:
    """A capacity of 12 holds two sequences. What fits is found, and nothing else ever is."""
    blocks = CachedBlocks(capacity, 1)
    for tokens in used:
        blocks.use(hash_blocks(tokens[:6], 1))
    assert len(blocks) <= capacity
    found = [block in blocks._hashes for block in hash_blocks(prompt, 1)]
    assert found == sorted(found, reverse=True), "no block is there without those before it"
    assert blocks.match_prefix(hash_blocks(prompt, 1)) == sum(found)
    recent = max((_common(tokens[:6], prompt) for tokens in used[-(capacity // 6) :] if capacity >= 6), default=0)
    ever = max((_common(tokens[:6], prompt) for tokens in used), default=0)
    assert recent <= sum(found) <= ever


@given(st.lists(st.tuples(st.integers(0, 40), Tokens), min_size=2, max_size=4), Tokens)
def test_no_engine_is_better_in_both(engines: list[tuple[int, "array[int]"]], prompt: "array[int]") -> None:
    """None has a longer prefix and fewer sequences than the chosen one, and the ratio of loads is bounded."""
    router, fakes = Router(), [FakeEngine(load) for load, _ in engines]
    for fake, (_, tokens) in zip(fakes, engines, strict=True):
        router.note(fake, tokens, [ANSWER[:1]])
    cached = [_common(tokens, prompt) // BLOCK for _, tokens in engines]
    index = chosen(router, fakes, prompt)
    for load, prefix in zip([fake.load for fake in fakes], cached, strict=True):
        assert load >= fakes[index].load or prefix < cached[index]
        assert load > fakes[index].load or prefix <= cached[index]
    least = min(fake.load for fake in fakes)
    assert fakes[index].load + 1 <= (least + 1) * (len(prompt) + OUTPUT) / OUTPUT


def _common(first: "array[int]", second: "array[int]") -> int:
    """Return the length of the common prefix."""
    equal = [one == other for one, other in zip(first, second, strict=False)]
    return equal.index(False) if False in equal else len(equal)

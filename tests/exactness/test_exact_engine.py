"""The embedded model: what a request gets does not depend on its neighbours, on chunks, on preemption or on the cache.

Each request runs alone first, in a pool where nothing is shared; everything else must give the same to the last bit.
The weights are those that the model is served with by default, quantised, and, with fewer requests, float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from quire.engine import InProcessEngine
from services.worker.interface import PendingStep, Runner
from shared.hub.checkpoint import locate
from shared.params import MAX_LOGPROBS, SamplingParams
from shared.protocol import NewSequence, StepPlan
from shared.text.tokenizer import Tokenizer
from tests.exactness.embedded_model import EDGES, Output, Request, draw_requests, engine, serve
from tests.exactness.equality import EXACT, assert_alike, differ
from tests.exactness.margin_rule import Run, assert_same

BLOCK = 16

TOKENS = list(range(500, 533))

SMALL: dict[str, dict[str, Any]] = {
    "auto": {"num_gpu_blocks_override": 39, "block_size": 8, "max_num_seqs": 32, "max_num_batched_tokens": 64},
    "float32": {"num_gpu_blocks_override": 11, "block_size": 8, "max_num_seqs": 32, "max_num_batched_tokens": 64},
}
"""A pool for the longest request and little more, and short steps, by the type of the weights."""


def crowded(dtype: str, **settings: Any) -> InProcessEngine:
    return engine(dtype, **SMALL[dtype], **settings)


@pytest.fixture(scope="module", params=["auto", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def requests(dtype: str) -> list[Request]:
    return draw_requests(32, seed=6) if dtype == "auto" else draw_requests(12, seed=8, longest=60)


@pytest.fixture(scope="module")
def plain(dtype: str) -> InProcessEngine:
    """Return an engine that has room for all requests and shares nothing."""
    return engine(dtype, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def caching(dtype: str) -> InProcessEngine:
    return engine(dtype)


@pytest.fixture(scope="module")
def alone(requests: list[Request], plain: InProcessEngine) -> list[Run]:
    return [serve(plain, [request])[0].run for request in requests]


def runs(outputs: Sequence[Output]) -> list[Run]:
    return [output.run for output in outputs]


@pytest.fixture(scope="module")
def together(requests: list[Request], caching: InProcessEngine) -> list[Output]:
    """Return the outputs of all requests in one batch, with an empty prefix cache."""
    return serve(caching, requests)


def test_a_batch_gives_each_request_what_it_gets_alone(
    alone: list[Run], together: list[Output], caching: InProcessEngine
) -> None:
    assert_alike(alone, runs(together), caching.model.vocab_size)


def test_alone_each_token_is_the_one_that_its_seed_stands_for(alone: list[Run], plain: InProcessEngine) -> None:
    assert_same(alone, alone, plain.model.vocab_size)


def test_by_default_it_is_served_in_its_own_bits(plain: InProcessEngine, dtype: str) -> None:
    assert plain.model.dtype == ("gguf" if dtype == "auto" and EXACT else "float32")


def test_prompts_found_in_the_cache_change_nothing(
    requests: list[Request], alone: list[Run], together: list[Output], caching: InProcessEngine
) -> None:
    """PFX-01."""
    again = serve(caching, requests)
    assert_alike(alone, runs(again), caching.model.vocab_size)
    lengths = [len(request.prompt) for request in requests]
    assert set(EDGES) <= set(lengths)
    expected = [min(length // BLOCK * BLOCK, length - 1) for length in lengths]
    assert [output.cached_tokens for output in again] == expected


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_pool_too_small_for_all_and_short_steps_change_nothing(
    requests: list[Request], alone: list[Run], dtype: str, mode: str
) -> None:
    """SCH-02, SCH-03."""
    small = crowded(dtype, preemption_mode=mode)
    outputs = serve(small, requests)
    snapshot = small.engine.snapshot
    print(f"{snapshot.preemptions} preemptions in {snapshot.steps} steps, {snapshot.preemptions_swapped} swapped")
    assert snapshot.preemptions > 0
    assert snapshot.preemptions_swapped == (snapshot.preemptions if mode == "swap" else 0)
    assert_alike(alone, runs(outputs), small.model.vocab_size)


def test_a_cache_of_eight_bits_is_swapped_with_its_scales(requests: list[Request], dtype: str) -> None:
    """Three that fit the pool when they begin, and not when they end."""
    sampling = msgspec.structs.replace(requests[0].sampling, max_tokens=40)
    few = [Request(TOKENS[start : start + 11], sampling) for start in (0, 11, 22)]
    int8 = {"kv_cache_dtype": "int8"}
    roomy = engine(dtype, worker=int8)
    alone = [serve(roomy, [request])[0].run for request in few]
    small = engine(dtype, worker=int8, preemption_mode="swap", num_gpu_blocks_override=12, block_size=8)
    outputs = serve(small, few)
    assert small.engine.snapshot.preemptions_swapped > 0
    assert_alike(alone, runs(outputs), small.model.vocab_size)


def test_prompts_found_in_host_memory_change_nothing(requests: list[Request], alone: list[Run], dtype: str) -> None:
    """The pool has reused all blocks of a prompt when it comes again."""
    small = crowded(dtype, preemption_mode="swap")
    for request in requests:
        serve(small, [request])
    outputs = [serve(small, [request])[0] for request in requests]
    snapshot = small.engine.snapshot
    assert snapshot.preemptions == 0
    assert snapshot.host_prefix_hits > snapshot.prefix_hits
    assert_alike(alone, runs(outputs), small.model.vocab_size)


def test_a_seeded_request_does_not_see_who_is_beside_it(plain: InProcessEngine) -> None:
    """SMP-01."""
    one = ask(plain, "The sea was calm, and the keeper", SamplingParams(seed=42, temperature=0.8, top_k=19))
    unseeded, seeded = (
        ask(plain, "Once upon a time", SamplingParams(seed=seed, temperature=0.8)) for seed in (None, 7)
    )
    (undisturbed,) = serve(plain, [one])
    beside = [serve(plain, [one, unseeded])[0], serve(plain, [seeded, one])[1]]
    assert_alike([undisturbed.run] * 2, runs(beside), plain.model.vocab_size)


def ask(engine: InProcessEngine, text: str, params: SamplingParams) -> Request:
    """Return the request that `LLM` and the server make of `params`, except that nothing ends it early."""
    prompt = Tokenizer.load(locate("")).encode(text)
    params = msgspec.structs.replace(params, logprobs=MAX_LOGPROBS, ignore_eos=True)
    model, length = engine.model, engine.limits.max_model_len
    return Request(
        prompt,
        params.to_sampling(prompt_len=len(prompt), max_model_len=length, vocab_size=model.vocab_size, eos_token_ids=()),
    )


class Confused:
    """A runner that gets new sequences other than the scheduler sent them."""

    def __init__(self, runner: Runner, spoil: Callable[[list[NewSequence]], list[NewSequence]]) -> None:
        self.runner = runner
        self.spoil = spoil

    def launch(self, plan: StepPlan) -> PendingStep:
        return self.runner.launch(msgspec.structs.replace(plan, new_sequences=self.spoil(plan.new_sequences)))


def with_other_noise(new: list[NewSequence]) -> list[NewSequence]:
    replace = msgspec.structs.replace
    return [replace(one, sampling=replace(one.sampling, seed=one.sampling.seed ^ 1)) for one in new]


def with_one_block_in_two_tables(new: list[NewSequence]) -> list[NewSequence]:
    return [msgspec.structs.replace(one, blocks=[new[0].blocks[0], *one.blocks[1:]]) for one in new]


@pytest.mark.parametrize("spoil", [with_other_noise, with_one_block_in_two_tables])
def test_a_spoiled_plan_is_found(
    requests: list[Request],
    alone: list[Run],
    plain: InProcessEngine,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[list[NewSequence]], list[NewSequence]],
) -> None:
    some = [index for index, request in enumerate(requests) if 1 < len(request.prompt) < 2 * BLOCK][:6]
    monkeypatch.setattr(plain, "runner", Confused(plain.runner, spoil))
    outputs = serve(plain, [requests[index] for index in some])
    vocab_size = plain.model.vocab_size
    pairs = zip((alone[index] for index in some), runs(outputs), strict=True)
    faulty = [differ(run, other, vocab_size) for run, other in pairs]
    if spoil is with_other_noise:
        sampled = [requests[index].sampling.temperature > 0 for index in some]
        assert sum(faulty) > sum(sampled) / 2
        assert not any(is_faulty and not noisy for is_faulty, noisy in zip(faulty, sampled, strict=True))
    else:
        assert sum(faulty) > len(some) / 2

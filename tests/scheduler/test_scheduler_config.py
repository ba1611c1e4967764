"""Tests the limits and the engine that the scheduler derives from its settings and the first worker."""

import re

import pytest
from msgspec.structs import replace

from services.scheduler.config import (
    MAX_BLOCKS,
    SchedulerConfig,
    count_blocks,
    count_host_blocks,
    make_limits,
    swap_seconds,
)
from services.scheduler.engine import Engine
from shared.config import load
from shared.errors import ConfigError
from shared.protocol import ReasoningLimit, Refusal, Refused, Sampling, pack_token_set
from tests.scheduler.examples import MODEL, REGISTER, submit


def engine() -> Engine:
    """Return an engine with one worker."""
    engine = Engine(SchedulerConfig(), REGISTER)
    engine.configure(REGISTER)
    return engine


def test_blocks_are_what_the_memory_holds() -> None:
    assert count_blocks(SchedulerConfig(), REGISTER) == 50
    assert count_blocks(SchedulerConfig(block_size=32), REGISTER) == 25
    assert count_blocks(SchedulerConfig(), replace(REGISTER, kv_memory=160 * 51 - 1)) == 50
    assert count_blocks(SchedulerConfig(num_gpu_blocks_override=7), REGISTER) == 7


def test_host_blocks_are_what_the_hosts_memory_holds() -> None:
    worker = replace(REGISTER, host_kv_memory=160 * 7 + 1, swap_bytes_per_second=1600.0)
    assert count_host_blocks(SchedulerConfig(), REGISTER) == 0
    assert count_host_blocks(SchedulerConfig(), worker) == 7
    assert count_host_blocks(SchedulerConfig(num_gpu_blocks_override=3), worker) == 7
    assert count_host_blocks(SchedulerConfig(preemption_mode="recompute"), worker) == 7, "for prefixes"
    useless = SchedulerConfig(preemption_mode="recompute", enable_prefix_caching=False)
    assert count_host_blocks(useless, worker) == 0
    assert (swap_seconds(SchedulerConfig(), worker), swap_seconds(SchedulerConfig(), REGISTER)) == (0.1, 0)
    assert Engine(SchedulerConfig(), worker).configure(worker).num_host_blocks == 7


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
def test_the_preemption_mode_reaches_the_core(mode: str) -> None:
    config = load(SchedulerConfig, ["--preemption-mode", mode], {}, prog="x")
    assert make_limits(config, REGISTER).preemption_mode == mode


def test_no_memory_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="the worker has 159 bytes for KV, but one block takes 160"):
        count_blocks(SchedulerConfig(), replace(REGISTER, kv_memory=159))


@pytest.mark.parametrize(
    ("requested", "blocks", "length"),
    [(None, 100, 1000), (None, 50, 800), (500, 50, 500), (2000, 100, 1000), (900, 2, 32)],
)
def test_the_context_is_the_least_of_setting_model_and_memory(requested: int | None, blocks: int, length: int) -> None:
    config = SchedulerConfig(max_model_len=requested, num_gpu_blocks_override=blocks)
    assert make_limits(config, REGISTER).max_model_len == length


@pytest.mark.parametrize(
    ("device", "requested", "tokens"), [("cpu", None, 128 + 128), ("cuda:0", None, 128 + 8192), ("cuda", 200, 200)]
)
def test_the_size_of_a_step_goes_by_device(device: str, requested: int | None, tokens: int) -> None:
    limits = make_limits(SchedulerConfig(max_num_batched_tokens=requested), replace(REGISTER, device=device))
    assert limits.max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("device", "requested", "seconds"),
    [("cpu", None, 0.1), ("cuda:0", None, 0.0), ("cpu", 0.0, 0.0), ("cuda", 50, 0.05)],
)
def test_the_time_of_a_step_goes_by_device(device: str, requested: float | None, seconds: float) -> None:
    limits = make_limits(SchedulerConfig(max_step_ms=requested), replace(REGISTER, device=device))
    assert limits.max_step_seconds == seconds


@pytest.mark.parametrize(
    ("token_seconds", "settings", "tokens"),
    [
        (0.001, {}, 128),
        (0.0003, {}, 256),  # 333 fit; a multiple of 128
        (0.0003, {"max_step_ms": 200}, 640),
        (0.0003, {"max_step_ms": 0}, 128),
        (1e-7, {}, 2048),
        (0.0, {}, 2048),
    ],
)
def test_a_fast_machine_takes_more_of_a_prompt_in_a_step(
    token_seconds: float, settings: dict[str, int], tokens: int
) -> None:
    register = replace(REGISTER, token_seconds=token_seconds)
    assert make_limits(SchedulerConfig(**settings), register).max_num_batched_tokens == 128 + tokens
    on_gpu = make_limits(SchedulerConfig(max_step_ms=100), replace(register, device="cuda"))
    assert on_gpu.max_num_batched_tokens == 128 + 8192, "as much as the worker has kept memory for"
    requested = make_limits(SchedulerConfig(max_num_batched_tokens=200, **settings), register)
    assert requested.max_num_batched_tokens == 200


def test_the_worker_s_measurements_reach_the_core() -> None:
    """A stream begins, and then a prompt gets what fits by them."""
    one = Engine(SchedulerConfig(max_step_ms=50), REGISTER)
    one.configure(REGISTER)  # 10 ms a step, 1 ms a token
    one.submit(submit(1, max_tokens=50), 1.0)
    one.plan(1.0)
    one.submit(submit(2, [1] * 90), 1.0)
    assert [row.count for row in one.plan(1.0).rows] == [1, 32]


def test_every_setting_reaches_the_core() -> None:
    config = SchedulerConfig(
        block_size=8,
        max_num_seqs=5,
        max_num_queued_reqs=6,
        max_num_queued_tokens=7,
        enable_prefix_caching=False,
        async_scheduling=False,
        scheduling_policy="priority",
        priority_ageing=1.5,
    )
    limits = make_limits(config, REGISTER)
    assert (limits.block_size, limits.num_blocks, limits.max_num_seqs) == (8, 100, 5)
    assert (limits.max_queued_requests, limits.max_queued_tokens) == (6, 7)
    assert (limits.prefix_caching, limits.depth) == (False, 1)
    assert (limits.policy, limits.priority_ageing) == ("priority", 1.5)
    assert make_limits(SchedulerConfig(), REGISTER).depth == 2


@pytest.mark.parametrize(
    ("tokens", "sampling", "violation"),
    [
        ([0, 99], Sampling(5, 0), ""),
        ([5], Sampling(5, 2**64 - 1, logit_bias=[(99, 1.0)], stop_token_ids=[0, 99], logprobs=64), ""),
        ([0, 100], Sampling(5, 0), "the model has no token 100"),
        ([-1, 5], Sampling(5, 0), "the model has no token -1"),
        ([5], Sampling(5, 0, stop_token_ids=[3, 100]), "the model has no token 100"),
        ([5], Sampling(5, 0, logit_bias=[(3, 1.0), (-7, 1.0)]), "the model has no token -7"),
        ([5], Sampling(5, 0, allowed_tokens=pack_token_set([0, 99]), bad_words=[[99], [0, 99]]), ""),
        ([5], Sampling(5, 0, allowed_tokens=pack_token_set([0, 100])), "the model has no token 100"),
        ([5], Sampling(5, 0, allowed_tokens=b"\0\0"), "no token is allowed"),
        ([5], Sampling(5, 0, bad_words=[[1], [1, 100]]), "the model has no token 100"),
        ([5], Sampling(5, 0, logprob_token_ids=[0, 99]), ""),
        ([5], Sampling(5, 0, logprob_token_ids=[0, 100]), "the model has no token 100"),
        ([5], Sampling(5, 0, reasoning_limit=ReasoningLimit(5, [99], [98, 97])), ""),
        ([5], Sampling(5, 0, reasoning_limit=ReasoningLimit(5, [99], [100])), "the model has no token 100"),
        ([5], Sampling(5, 0, reasoning_limit=ReasoningLimit(5, [100], [99])), "the model has no token 100"),
        ([5], Sampling(5, 0, logprobs=65), "at most 64 log-probabilities are reported for a token"),
        ([5], Sampling(5, 0, prompt_logprobs=1 << 40), "at most 20 log-probabilities are reported for a token"),
    ],
)
def test_what_no_worker_may_be_handed(tokens: list[int], sampling: Sampling, violation: str) -> None:
    refused = engine().submit(replace(submit(1, tokens), sampling=sampling), 0.0)
    assert refused == (Refused(1, Refusal.INVALID, violation) if violation else None)


@pytest.mark.parametrize("changes", [{"n": 1 << 60}, {"n": 129}, {"sample": 128}])
def test_samples_are_bounded(changes: dict[str, int]) -> None:
    subject = engine()
    refused = subject.submit(replace(submit(1), **changes), 0.0)
    assert refused is not None
    assert (refused.reason, refused.detail) == (Refusal.INVALID, "a request has at most 128 samples")
    assert subject.submit(replace(submit(2), n=128), 0.0) is None


def test_an_engine_goes_on_with_another_worker_of_the_same_model_only(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(SchedulerConfig(), REGISTER)
    first = engine.configure(REGISTER)
    assert engine.submit(submit(1), 0.0) is None
    assert engine.plan(0.0) is not None
    engine.lose_worker(1.0)
    assert engine.mismatch(replace(REGISTER, model=replace(MODEL, vocab_size=99)))
    assert engine.mismatch(replace(REGISTER, model=replace(MODEL, name="other")))
    assert engine.mismatch(replace(REGISTER, model=replace(MODEL, weights_digest="of files that were replaced")))
    assert engine.mismatch(replace(REGISTER, model=replace(MODEL, text_digest="of another tokenizer")))
    assert not engine.mismatch(REGISTER)
    assert "continued outputs may differ" not in caplog.text
    assert not engine.mismatch(replace(REGISTER, model=replace(MODEL, fingerprint="g")))
    assert "continued outputs may differ" in caplog.text
    second = engine.configure(replace(REGISTER, kv_memory=160 * 80))
    assert (second.num_blocks, second.max_model_len) == (80, first.max_model_len)
    assert (second.epoch.boot_id, second.epoch.count) == (first.epoch.boot_id, first.epoch.count + 1)
    assert engine.plan(2.0) is not None


@pytest.mark.parametrize("kv_memory", [160 * 49, 1, 0])
def test_a_later_worker_must_hold_the_context_that_was_promised(kv_memory: int) -> None:
    """PRC-27: a smaller one does not match, which is not an error of the settings. A larger one matches."""
    engine = Engine(SchedulerConfig(max_model_len=800), REGISTER)
    engine.configure(REGISTER)
    small = replace(REGISTER, kv_memory=kv_memory)
    assert re.fullmatch(r"its memory holds \d+ tokens, but requests of 800 .*", engine.mismatch(small))
    assert not engine.mismatch(replace(REGISTER, kv_memory=160 * 50))
    assert not engine.mismatch(replace(REGISTER, kv_memory=160 * 500))


def test_a_pool_is_bounded_whatever_memory_there_is() -> None:
    """PRC-27: a token of one byte would make tables of gigabytes here."""
    vast = replace(REGISTER, kv_memory=2**49, kv_bytes_per_token=1)
    assert count_blocks(SchedulerConfig(), vast) == MAX_BLOCKS
    assert count_blocks(SchedulerConfig(num_gpu_blocks_override=MAX_BLOCKS), vast) == MAX_BLOCKS
    with pytest.raises(ConfigError, match="num-gpu-blocks-override"):
        load(SchedulerConfig, [f"--num-gpu-blocks-override={MAX_BLOCKS + 1}"], {}, prog="")


@pytest.mark.parametrize("value", ["inf", "nan", "1e10"])
def test_ageing_is_finite(value: str) -> None:
    """PRC-26: no setting makes a queue position NaN."""
    with pytest.raises(ConfigError, match="priority-ageing"):
        load(SchedulerConfig, ["--scheduling-policy=priority", f"--priority-ageing={value}"], {}, prog="")

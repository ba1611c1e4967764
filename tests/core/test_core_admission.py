"""Tests which requests the core refuses, and why. It accepts all others."""

import pytest
from msgspec.structs import replace

from services.scheduler.core import Limits, Scheduler, admission
from shared.protocol import Epoch, Refusal, Sampling, StepResult, Submit, pack_tokens

LIMITS = Limits(num_blocks=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, max_queued_requests=3)


def _submit(
    id: int = 1,
    tokens: int = 8,
    prompt_len: int = 8,
    max_tokens: int = 4,
    raw: bytes | None = None,
    **fields: int,
) -> Submit:
    packed = pack_tokens([1] * tokens) if raw is None else raw
    return Submit(id, packed, prompt_len, Sampling(max_tokens=max_tokens, seed=0), **fields)


@pytest.mark.parametrize(
    ("submit", "reason", "words"),
    [
        (_submit(raw=b"abc"), Refusal.INVALID, "fours"),
        (_submit(tokens=7), Refusal.INVALID, "there are 7 tokens"),
        (_submit(raw=pack_tokens([-1] * 8)), Refusal.INVALID, "the model has no token -1"),
        (_submit(n=0), Refusal.INVALID, "n must be at least 1"),
        (_submit(tokens=9, n=2), Refusal.INVALID, "output already"),
        (_submit(tokens=12), Refusal.INVALID, "leave none"),
        (_submit(priority=1), Refusal.INVALID, "--scheduling-policy"),
        (_submit(max_tokens=57), Refusal.TOO_LONG, "64 of the context"),
        (_submit(tokens=65, prompt_len=65, max_tokens=0), Refusal.TOO_LONG, "65 tokens"),
    ],
)
def test_what_breaks_a_rule_or_never_fits_is_refused(submit: Submit, reason: Refusal, words: str) -> None:
    core = Scheduler(LIMITS)
    refused = core.submit(submit, 1.0)
    assert refused is not None
    assert (refused.id, refused.reason) == (1, reason)
    assert words in refused.detail
    assert core.idle
    assert core.snapshot().refused == 1


@pytest.mark.parametrize(
    "submit",
    [
        _submit(max_tokens=56),
        _submit(tokens=64, prompt_len=64, max_tokens=0),
        _submit(tokens=11),
        _submit(n=5, sample=2),
    ],
)
def test_what_just_fits_is_accepted(submit: Submit) -> None:
    core = Scheduler(LIMITS)
    assert core.submit(submit, 1.0) is None
    assert (core.idle, core.snapshot().accepted) == (False, 1)


def test_an_id_in_use_is_refused() -> None:
    core = Scheduler(LIMITS)
    assert core.submit(_submit(), 1.0) is None
    refused = core.submit(_submit(), 1.0)
    assert refused is not None
    assert refused.reason is Refusal.INVALID


def test_a_full_queue_refuses_at_once_but_never_a_resubmission() -> None:
    core = Scheduler(LIMITS)
    for id in range(3):
        assert core.submit(_submit(id), 1.0) is None
    refused = core.submit(_submit(3), 1.0)
    assert refused is not None
    assert (refused.reason, refused.retry_after) == (Refusal.QUEUE_FULL, 1.0)
    assert core.submit(_submit(4, tokens=9), 1.0) is None


def test_tokens_in_the_queue_are_bounded_if_asked() -> None:
    core = Scheduler(
        Limits(num_blocks=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, max_queued_tokens=20)
    )
    assert core.submit(_submit(1, tokens=30, prompt_len=30), 1.0) is None, "one may be longer than the bound"
    refused = core.submit(_submit(2, tokens=1, prompt_len=1), 1.0)
    assert refused is not None
    assert refused.reason is Refusal.QUEUE_FULL
    core.abort(1)
    assert core.submit(_submit(3), 1.0) is None
    assert core.submit(_submit(4), 1.0) is None
    assert core.submit(_submit(5), 1.0) is not None


def test_rejections_are_counted_by_the_limit_that_was_met() -> None:
    """API-04: vllm:admission_rejections counts these; other refusals are not part of it."""
    core = Scheduler(replace(LIMITS, max_queued_requests=2, max_queued_tokens=6))
    assert core.submit(_submit(1, tokens=5, prompt_len=5), 1.0) is None
    assert core.submit(_submit(2, tokens=2, prompt_len=2), 1.0) is not None
    assert core.submit(_submit(3, tokens=1, prompt_len=1), 1.0) is None
    assert core.submit(_submit(4, tokens=1, prompt_len=1), 1.0) is not None
    assert core.submit(_submit(5, tokens=1, prompt_len=1), 1.0) is not None
    assert core.submit(_submit(3), 1.0) is not None, "the id is in use"
    state = core.snapshot()
    assert (state.rejected_by_requests, state.rejected_by_tokens, state.refused) == (2, 1, 4)


def test_retry_after_is_the_time_between_recent_ends() -> None:
    core = Scheduler(LIMITS)
    for id in range(10):
        core.submit(_submit(id), 100.0 + 5 * id)
        core.plan(100.0 + 5 * id)
        core.abort(id)
    for id in range(10, 13):
        core.submit(_submit(id), 146.0)
    refused = core.submit(_submit(99), 150.0)
    assert refused is not None
    assert refused.retry_after == pytest.approx(5.0)


def test_draining_takes_nothing_new_and_ends_what_is_there() -> None:
    core = Scheduler(LIMITS)
    core.begin_epoch(Epoch("boot", 1), 4)
    core.submit(_submit(1, max_tokens=0), 1.0)
    core.drain()
    refused = core.submit(_submit(2), 1.0)
    assert refused is not None
    assert refused.reason is Refusal.DRAINING
    refused = core.submit(_submit(3, tokens=9), 1.0)
    assert refused is not None, "another engine may go on with it"
    assert refused.reason is Refusal.DRAINING
    plan = core.plan(1.0)
    assert plan is not None
    core.commit(StepResult(plan.epoch, plan.step, []))
    assert core.idle


def test_resumed_requests_are_bounded_by_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_RESUMED", 6)
    monkeypatch.setattr(admission, "MAX_RESUMED_TOKENS", 40)
    core = Scheduler(LIMITS)
    resumed = [replace(_submit(id), resumed=True) for id in range(6)]
    refusals = [core.submit(one, 1.0) for one in resumed]
    assert refusals[:5] == [None] * 5, "beyond the 3 of the queue"
    assert refusals[5] is not None
    assert refusals[5].reason is Refusal.QUEUE_FULL
    short = [replace(_submit(id, tokens=1, prompt_len=1), resumed=True) for id in range(10, 13)]
    core.abort(0)
    assert [core.submit(one, 1.0) is None for one in short] == [True, True, False]


def test_a_prompt_of_a_whole_frame_is_refused_by_its_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at each of its tokens takes half a second, in which nobody is served."""
    monkeypatch.setattr(admission, "unpack_tokens", lambda data: pytest.fail("it has looked"))
    refused = Scheduler(LIMITS).submit(_submit(raw=bytes(60 << 20)), 1.0)
    assert refused is not None
    assert refused.reason is Refusal.TOO_LONG

"""`Limits`: the sizes that a core keeps to, checked when they are made.

The module knows nothing of flags or files, but its errors name the flags, since a user corrects a wrong size there.
"""

from typing import Literal

from msgspec import Struct

from shared.errors import ConfigError

PreemptionMode = Literal["auto", "swap", "recompute"]

MAX_DEPTH = 65
"""Maximum number of steps in flight: one in each stage of the longest pipeline, and one that waits for the first."""


class WorkerResources(Struct, frozen=True, array_like=True):
    """The resources of a worker besides its blocks: measured costs, and room for swapped blocks and adapters.

    A cost of 0 was not measured.
    """

    step_seconds: float = 0.0  # the fixed cost of a step
    token_seconds: float = 0.0  # the cost of one more token
    num_host_blocks: int = 0
    swap_seconds: float = 0.0  # the cost of a block that is copied to host memory, or back
    max_loras: int = 0  # slots for adapters
    max_cpu_loras: int = 0  # adapters in host memory


NO_RESOURCES = WorkerResources()


class Limits(Struct, frozen=True, kw_only=True):
    """Sizes of one engine. Raise `ConfigError`, naming the flag, for sizes that cannot work together."""

    num_blocks: int  # of the pool
    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # positions in one plan
    max_model_len: int  # prompt and output of one sequence together, in tokens
    vocab_size: int = 2**31  # token ids are below it
    block_size: int = 16  # tokens
    max_queued_requests: int = 1024  # requests that may wait; more are refused
    max_queued_tokens: int = 0  # the same in tokens; 0: no such bound
    max_step_seconds: float = 0.0  # that a step should take at most while anybody streams; 0: no such bound
    prefix_caching: bool = True
    preemption_mode: PreemptionMode = "auto"  # what happens to a victim's blocks; see swap_policy.py
    depth: int = 2  # plans in flight at once; with 2, the device has one to run while the other is committed
    num_stages: int = 1  # of the workers' pipeline
    policy: Literal["fcfs", "priority"] = "fcfs"
    priority_ageing: float = 0.0  # seconds of waiting that one unit of priority is worth; 0: priority is strict

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_num_seqs", "max_model_len", "block_size", "max_queued_requests", "num_stages"):
            _check(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))
        _check(1 <= self.depth <= MAX_DEPTH, "depth", f"must be from 1 to {MAX_DEPTH}", self.depth)
        _check(self.max_queued_tokens >= 0, "max_queued_tokens", "must be at least 0", self.max_queued_tokens)
        _check(self.max_step_seconds >= 0, "max_step_ms", "must be at least 0", self.max_step_seconds * 1000)
        _check(self.priority_ageing >= 0, "priority_ageing", "must be at least 0", self.priority_ageing)
        check_settings(self.max_num_batched_tokens, self.max_num_seqs, self.policy, self.priority_ageing)
        check_pool(self.max_model_len, self.num_blocks, self.block_size)


def check_settings(max_num_batched_tokens: int | None, max_num_seqs: int, policy: str, priority_ageing: float) -> None:
    """Raise `ConfigError` for settings that cannot work together on any device.

    `max_num_batched_tokens` is None if it follows from the others.
    """
    if policy == "fcfs":  # ageing would do nothing
        _check(not priority_ageing, "priority_ageing", "needs --scheduling-policy priority", priority_ageing)
    if max_num_batched_tokens is not None:  # a step of all sequences still has room for some prompt
        rule = f"must be more than --max-num-seqs, which is {max_num_seqs}"
        _check(max_num_batched_tokens > max_num_seqs, "max_num_batched_tokens", rule, max_num_batched_tokens)


def check_pool(max_model_len: int, num_blocks: int, block_size: int) -> None:
    """Raise `ConfigError` unless one sequence of `max_model_len` tokens fits the pool when it is alone."""
    capacity = num_blocks * block_size
    rule = f"must be at most the {capacity} tokens of the pool"
    _check(max_model_len <= capacity, "max_model_len", rule, max_model_len)


def _check(ok: bool, name: str, rule: str, value: object) -> None:
    if not ok:
        raise ConfigError(f"--{name.replace('_', '-')} {rule}, got {value!r}")

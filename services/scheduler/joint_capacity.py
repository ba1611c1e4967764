"""`joint_capacity`: what the ranks of a group offer together, as if they were one worker.

A block has a part on each rank, so the rank that holds the fewest tokens decides how many blocks there are. A step goes
through the stages one after the other, and in each of them the slowest rank decides: the time of a step is that from
its first stage to its last, which is what a stream waits for its next token, though more steps may be under way.
"""

from collections.abc import Sequence

from msgspec import Struct

from services.scheduler.config import WorkerCapacity
from shared.protocol import ModelInfo


class JointCapacity(Struct, frozen=True):
    """A `WorkerCapacity` of several ranks."""

    model: ModelInfo
    device: str
    kv_bytes_per_token: int  # of all ranks
    kv_memory: int  # of all ranks, as far as it can be used
    step_seconds: float
    token_seconds: float
    host_kv_memory: int
    swap_bytes_per_second: float  # of all ranks, which copy at the same time
    max_loras: int
    max_cpu_loras: int
    num_stages: int


def joint_capacity(ranks: Sequence[WorkerCapacity]) -> WorkerCapacity:
    """Return the capacity of a group, whose ranks come in the order of their numbers and agree in what they must."""
    first = ranks[0]
    if len(ranks) == 1:
        return first
    token_bytes = sum(rank.kv_bytes_per_token for rank in ranks)
    tokens = min(rank.kv_memory // rank.kv_bytes_per_token for rank in ranks)
    host_tokens = min(rank.host_kv_memory // rank.kv_bytes_per_token for rank in ranks)
    size = len(ranks) // first.num_stages
    stages = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return JointCapacity(
        model=first.model,
        device=first.device,
        kv_bytes_per_token=token_bytes,
        kv_memory=tokens * token_bytes,
        step_seconds=sum(max(rank.step_seconds for rank in stage) for stage in stages),
        token_seconds=sum(max(rank.token_seconds for rank in stage) for stage in stages),
        host_kv_memory=host_tokens * token_bytes,
        swap_bytes_per_second=_swap_bandwidth(ranks, token_bytes),
        max_loras=min(rank.max_loras for rank in ranks),
        max_cpu_loras=min(rank.max_cpu_loras for rank in ranks),
        num_stages=first.num_stages,
    )


def _swap_bandwidth(ranks: Sequence[WorkerCapacity], token_bytes: int) -> float:
    """Return the bytes of all ranks that are copied in a second; 0 if a rank has not measured its own."""
    if not all(rank.swap_bytes_per_second for rank in ranks):
        return 0.0
    return token_bytes / max(rank.kv_bytes_per_token / rank.swap_bytes_per_second for rank in ranks)

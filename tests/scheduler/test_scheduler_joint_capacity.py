"""The joint numbers of a group: the least rank decides about memory, the slowest of each stage about time."""

from typing import Any

import pytest
from msgspec.structs import replace

from services.scheduler.config import (
    SchedulerConfig,
    bytes_per_block,
    count_blocks,
    count_host_blocks,
    make_limits,
    swap_seconds,
)
from services.scheduler.engine import Engine
from services.scheduler.joint_capacity import joint_capacity
from shared.protocol import Register
from tests.scheduler.examples import REGISTER

CONFIG = SchedulerConfig()


def ranks(*changes: dict[str, Any], num_stages: int = 1) -> list[Register]:
    group = replace(REGISTER, world_size=len(changes), num_stages=num_stages)
    return [replace(group, rank=rank, **change) for rank, change in enumerate(changes)]


def test_one_rank_is_its_own_group() -> None:
    assert joint_capacity([REGISTER]) is REGISTER


@pytest.mark.parametrize(
    "sizes",
    [
        [(10, 160 * 50), (10, 160 * 50)],
        [(10, 160 * 50), (10, 160 * 40)],
        [(10, 160 * 50), (30, 480 * 70)],  # the last stage has three times as many layers
        [(10, 160 * 50 + 159), (7, 160 * 50), (13, 160 * 90)],
        [(10, 160 * 50), (10, 0)],
    ],
)
def test_there_are_as_many_blocks_as_the_rank_with_the_fewest_has(sizes: list[tuple[int, int]]) -> None:
    changes = [{"kv_bytes_per_token": token, "kv_memory": size, "host_kv_memory": size // 2} for token, size in sizes]
    joint = joint_capacity(ranks(*changes))
    alone = [replace(REGISTER, **change) for change in changes]
    least = min(one.kv_memory // bytes_per_block(CONFIG, one) for one in alone)
    if least:
        assert count_blocks(CONFIG, joint) == least
    assert count_host_blocks(CONFIG, joint) == min(count_host_blocks(CONFIG, one) for one in alone)
    assert bytes_per_block(CONFIG, joint) == sum(bytes_per_block(CONFIG, one) for one in alone)


def test_a_step_takes_what_the_slowest_rank_of_each_stage_takes() -> None:
    seconds = [(0.01, 3e-4), (0.02, 1e-4), (0.04, 5e-4), (0.03, 7e-4)]
    changes = [{"step_seconds": step, "token_seconds": token} for step, token in seconds]
    together = joint_capacity(ranks(*changes))
    assert (together.step_seconds, together.token_seconds) == (0.04, 7e-4)
    staged = joint_capacity(ranks(*changes, num_stages=2))
    assert (staged.step_seconds, staged.token_seconds) == (pytest.approx(0.06), pytest.approx(1e-3))


def test_a_block_is_copied_when_the_slowest_rank_has_copied_its_part() -> None:
    changes = [
        {"kv_bytes_per_token": 10, "swap_bytes_per_second": 1e6},
        {"kv_bytes_per_token": 30, "swap_bytes_per_second": 2e6},
    ]
    alone = [replace(REGISTER, **change) for change in changes]
    slowest = max(swap_seconds(CONFIG, one) for one in alone)
    assert swap_seconds(CONFIG, joint_capacity(ranks(*changes))) == pytest.approx(slowest)
    changes[0]["swap_bytes_per_second"] = 0.0
    assert swap_seconds(CONFIG, joint_capacity(ranks(*changes))) == 0.0, "one has not measured it"


def test_the_depth_follows_from_the_stages() -> None:
    def depths(num_stages: int) -> list[int]:
        joint = joint_capacity(ranks({}, {}, {}, {}, num_stages=num_stages))
        settings = [SchedulerConfig(), SchedulerConfig(async_scheduling=False)]
        limits = [make_limits(config, joint) for config in settings]
        assert all(one.num_stages == num_stages for one in limits)
        return [one.depth for one in limits]

    assert [depths(num_stages) for num_stages in (1, 2, 4)] == [[2, 1], [3, 2], [5, 4]]


def test_an_engine_takes_no_group_with_other_stages() -> None:
    engine = Engine(CONFIG, joint_capacity(ranks({}, {}, num_stages=2)))
    assert engine.mismatch(joint_capacity(ranks({}, {}, {}, {}, num_stages=2))) == ""
    reason = engine.mismatch(joint_capacity(ranks({}, {})))
    assert reason == "it has 1 pipeline stages, but this engine began with 2"

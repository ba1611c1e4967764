"""Tests what ranks exchange, between real processes that speak by Gloo."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from services.worker.config import WorkerConfig
from services.worker.interface import RankLost
from services.worker.parallel_config import ParallelConfig
from services.worker.rank_group import RankGroup
from services.worker.start import start_runner
from shared.errors import ConfigError, ModelError
from tests.ports import free_ports

CPU = torch.device("cpu")
TIMEOUT = 60.0


def run_ranks(task: Callable[[RankGroup], None], tp: int, pp: int, rendezvous: str) -> list[int | None]:
    """Run the task on all ranks, in a process each. Return their exit statuses."""
    context = multiprocessing.get_context("spawn")
    arguments = [(task, ParallelConfig(rank, tp, pp), rendezvous) for rank in range(tp * pp)]
    processes = [context.Process(target=_run_rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _run_rank(task: Callable[[RankGroup], None], parallel: ParallelConfig, rendezvous: str) -> None:
    torch.set_num_threads(1)
    group = RankGroup(parallel, CPU, rendezvous, TIMEOUT)
    for key in ("boot.1", "boot.2"):  # two epochs
        group.connect(key)
        with closing(group):
            task(group)


def exchange(group: RankGroup) -> None:
    """Check every operation. Ranks have their number as values."""
    parallel = group.parallel
    stage = torch.arange(parallel.tensor_parallel_size) + parallel.pp_rank * parallel.tensor_parallel_size
    own = torch.full((3, 2), float(parallel.rank))
    assert torch.equal(group.all_reduce(own.clone()), torch.full((3, 2), float(stage.sum())))
    assert torch.equal(group.all_gather(own), stage.float().repeat_interleave(2).repeat(3, 1))
    if not parallel.is_last_stage:
        group.send(own)
    if not parallel.is_first_stage:
        assert torch.equal(group.receive((3, 2), torch.float32), own - parallel.tensor_parallel_size)


def sum_rows(group: RankGroup) -> None:
    """Check that the bits of a row's sum do not depend on the other rows."""
    rows = torch.randn((40, 96), generator=torch.Generator().manual_seed(group.parallel.rank)) * 1000
    together = group.all_reduce(rows.clone())
    alone = torch.cat([group.all_reduce(rows[index : index + 1].clone()) for index in range(len(rows))])
    assert torch.equal(together, alone)


def check_receivers(group: RankGroup) -> None:
    """Check that Gloo's threads that receive cannot interrupt others."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    assert tasks
    assert {os.sched_getscheduler(int(task.name)) for task in tasks} == {os.SCHED_BATCH}
    group.all_gather(torch.zeros(1, 1))


def gather_forever(group: RankGroup) -> None:
    while True:
        group.all_gather(torch.zeros(1, 1))


def end_or_notice(group: RankGroup) -> None:
    """End the process of rank 1, and check that the other one learns of it in a line."""
    if group.parallel.rank == 1:
        group.all_gather(torch.zeros(1, 1))
        os._exit(7)
    with pytest.raises(RankLost, match=r"^another rank is gone or does not answer: [^/\n]+$"):
        gather_forever(group)
    os._exit(5)


def test_a_rank_that_ends_is_noticed_by_the_others(tmp_path: Path) -> None:
    assert run_ranks(end_or_notice, 2, 1, str(tmp_path)) == [5, 7]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such class")
def test_threads_that_receive_interrupt_nobody(tmp_path: Path) -> None:
    """They would otherwise spin while the thread that they have interrupted holds a lock."""
    assert run_ranks(check_receivers, 2, 1, str(tmp_path)) == [0, 0]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_exchange_what_they_have(tp: int, pp: int, tmp_path: Path) -> None:
    assert run_ranks(exchange, tp, pp, str(tmp_path)) == [0] * (tp * pp)


def test_ranks_of_several_hosts_meet_at_an_address() -> None:
    (port,) = free_ports(1)
    assert run_ranks(exchange, 2, 1, f"127.0.0.1:{port}") == [0, 0]


def test_a_rows_sum_does_not_depend_on_its_place(tmp_path: Path) -> None:
    assert run_ranks(sum_rows, 4, 1, str(tmp_path)) == [0] * 4


def test_a_rank_that_is_not_connected_computes_alone() -> None:
    group = RankGroup(ParallelConfig(1, 2, 2), CPU)
    own = torch.ones(3, 2)
    assert torch.equal(group.all_reduce(own), own)
    assert group.all_gather(own).shape == (3, 4)
    assert group.receive((3, 2), torch.float32).shape == (3, 2)


@pytest.mark.parametrize("rendezvous", ["", "/no/such/folder", "host", "host:x"])
def test_a_place_that_is_none_is_refused_before_a_model_is_loaded(rendezvous: str) -> None:
    with pytest.raises(ConfigError, match=f"--rendezvous '{rendezvous}' is neither host:port"):
        start_runner(WorkerConfig(model="/no/such/model", tensor_parallel_size=2, rank=0, rendezvous=rendezvous))
    with pytest.raises(ConfigError, match="--rendezvous"):
        RankGroup(ParallelConfig(0, 2, 1), CPU, rendezvous).connect("boot.1")


def test_sizes_that_no_model_has_are_refused_at_once() -> None:
    with pytest.raises(ModelError, match="cannot be divided by it; this model takes 1, 5, "):
        ParallelConfig(0, 2, 1).check_divisible({"attention heads": 5**20})


def test_ranks_are_numbered_stage_by_stage() -> None:
    places = [ParallelConfig(rank, 2, 2) for rank in range(4)]
    assert [(place.pp_rank, place.tp_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(place.is_first_stage, place.is_last_stage) for place in places[::2]] == [(True, False), (False, True)]
    assert {place.sampling_rank for place in places} == {2}

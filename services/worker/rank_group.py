"""`RankGroup`: the ranks that compute one model together, and what they exchange, by torch.distributed.

Tensor parallel ranks have a part of every layer each: they sum what they computed of a row (`all_reduce`) and join what
they have of its logits (`all_gather`). Pipeline stages have some consecutive layers each, and hidden states go from one
to the next (`send`, `receive`). A stage is `tensor_parallel_size` ranks with consecutive numbers, so rank r is number
`r % tensor_parallel_size` of stage `r // tensor_parallel_size`.

The group is made when the scheduler configures its ranks: before that, a rank that measures its speed computes as if
the others had nothing to add. The epoch is the key of the meeting, so no rank meets one of another epoch.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from services.worker.interface import RankLost
from services.worker.parallel_config import ParallelConfig, parse_rendezvous

LOOPBACK = "lo"

_TASKS = Path("/proc/self/task")
_GLOO_LOOP = "gloo_tcp_loop"
"""The name of Gloo's threads that receive, as Linux has it."""


class RankGroup:
    """The connection of a rank to the others of its group. A group of one exchanges nothing.

    `rendezvous` is where the ranks find each other: "host:port" of the host of rank 0, or a folder on one host. An
    operation raises RankLost after `timeout` seconds, or as soon as the connection to another rank ends. `ordered`
    makes sums on a GPU independent of the size of the batch too; on a CPU they always are.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        device: torch.device,
        rendezvous: str = "",
        timeout: float = 300.0,
        *,
        ordered: bool = False,
    ) -> None:
        self.parallel = parallel
        self._device, self._rendezvous, self._timeout = device, rendezvous, timedelta(seconds=timeout)
        self._ordered = ordered or device.type == "cpu"
        self._connected = False
        self._stage_group: dist.ProcessGroup | None = None  # the ranks of this stage
        self._tcp_store: Any = None  # one for all epochs, since rank 0 listens at its port

    def connect(self, key: str) -> None:
        """Meet the other ranks, which use the same `key`. Return once all are there. Raise RankLost if they are not
        within the timeout.
        """
        if self.parallel.world_size == 1:
            return
        self.close()
        tp, pp = self.parallel.tensor_parallel_size, self.parallel.pipeline_parallel_size
        with self._loss_named():
            dist.init_process_group(
                "nccl" if self._device.type == "cuda" else "gloo",
                store=PrefixStore(key, self._store(key)),
                rank=self.parallel.rank,
                world_size=self.parallel.world_size,
                timeout=self._timeout,
            )
            for stage in range(pp):  # every rank has to make every group
                group = dist.new_group(range(stage * tp, (stage + 1) * tp), timeout=self._timeout)
                if stage == self.parallel.pp_rank:
                    self._stage_group = group
        _let_senders_finish()
        self._connected = True

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if self._connected:
            self._connected = False
            dist.destroy_process_group()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks of this stage, the same bits on all of them.

        Where the order of a sum matters, it is that of the ranks: a ring, as the backends have it, adds an element in
        an order that depends on its place in the tensor, and so on the other rows of the batch.
        """
        if self.parallel.tensor_parallel_size == 1 or not self._connected:
            return x
        if not self._ordered:
            with self._loss_named():
                dist.all_reduce(x, group=self._stage_group)
            return x
        parts = self._gather(x)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the parts (N, W) of the ranks of this stage side by side, as (N, ranks x W)."""
        size = self.parallel.tensor_parallel_size
        if size == 1:
            return x
        parts = self._gather(x) if self._connected else [x] * size
        return torch.cat(parts, dim=-1)

    def send(self, x: Tensor) -> None:
        """Hand hidden states to the next stage."""
        if self._connected:
            with self._loss_named():
                dist.send(x.contiguous(), self.parallel.rank + self.parallel.tensor_parallel_size)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return hidden states from the stage before."""
        x = torch.zeros(shape, dtype=dtype, device=self._device)
        if self._connected:
            with self._loss_named():
                dist.recv(x, self.parallel.rank - self.parallel.tensor_parallel_size)
        return x

    def _gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.parallel.tensor_parallel_size)]
        with self._loss_named():
            dist.all_gather(parts, x, group=self._stage_group)
        return parts

    @contextmanager
    def _loss_named(self) -> Iterator[None]:
        """Raise RankLost for an error of an exchange within the block, without the place in its source or its advice.

        A GPU's may be about an earlier step, which is no loss; Gloo's have no type of their own.
        """
        try:
            yield
        except RuntimeError as error:
            if self._device.type != "cpu" and not isinstance(error, dist.DistError):
                raise
            reason = re.sub(r"\[\S+:\d+\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
            raise RankLost(f"another rank is gone or does not answer: {reason}") from error

    def _store(self, key: str) -> Any:
        place = parse_rendezvous(self._rendezvous)
        if isinstance(place, Path):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # the host's name may have no address
            return FileStore(str(place / key), self.parallel.world_size)
        if self._tcp_store is None:
            is_host = self.parallel.rank == 0
            self._tcp_store = TCPStore(*place, is_master=is_host, timeout=self._timeout)
        return self._tcp_store


def _let_senders_finish() -> None:
    """Keep Gloo's receiving threads from interrupting those that send.

    A sender holds the lock of its connection, and the thread that receives does not wait for that: it asks again and
    again. If its waking interrupts the sender on the same CPU, it does so for its whole time slice. A thread of the
    class SCHED_BATCH interrupts nobody.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in _TASKS.iterdir():
        with suppress(OSError):  # the thread has just ended, or its class is the user's choice
            if (task / "comm").read_text().strip() == _GLOO_LOOP:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))

"""An engine inside the caller's process: the scheduler's core and the worker's runner, without sockets.

The same values travel as between the services: plan, execute, commit. One plan is out at a time, since there is no
other process that could work on a second one meanwhile.
"""

import os
import time
import uuid
from collections.abc import Sequence

import msgspec

from services.scheduler.config import SchedulerConfig, configuration, limits
from services.scheduler.core import Scheduler
from services.worker.config import WorkerConfig
from services.worker.start import start_runner
from shared.errors import EngineFailure, InvalidRequest
from shared.protocol import VERSION, Epoch, FinishReason, ProgressRow, Register, Submit

UNBOUNDED = 2**31 - 1  # requests that may wait: the caller's list is in memory anyway


class Engine:
    """Loads the model, then runs what is submitted, step by step. Not safe to use from several threads."""

    def __init__(self, scheduler: SchedulerConfig, worker: WorkerConfig) -> None:
        self.runner = start_runner(worker)
        found = self.runner.info
        self.model = found.model
        register = Register(
            version=VERSION,
            identity="in-process",
            rank=0,
            world_size=1,
            pid=os.getpid(),
            **msgspec.structs.asdict(found),
        )
        wanted = msgspec.structs.replace(scheduler, async_scheduling=False, max_num_queued_reqs=UNBOUNDED)
        self.limits = limits(wanted, register)
        self.core = Scheduler(self.limits)
        self._epoch = Epoch(boot_id=uuid.uuid4().hex, count=0)
        self._begin_epoch()

    def submit(self, request: Submit) -> None:
        """Put a request into the queue. Raises `InvalidRequest` if it could never run."""
        if refused := self.core.submit(request, time.monotonic()):
            raise InvalidRequest(refused.detail)

    def abort(self, id: int, sample: int = -1) -> None:
        """End a request, or one of its samples."""
        self.core.abort(id, sample)

    def step(self) -> list[ProgressRow]:
        """Compute once; what came of it. Raises `EngineFailure` if the core cannot go on with a request."""
        plan = self.core.plan(time.monotonic())
        if plan is None:
            raise EngineFailure(f"nothing can be run, though there are requests: {self.core.snapshot()}")
        rows = self.core.commit(self.runner.execute(plan))
        for row in rows:
            if row.finish_reason is FinishReason.ERROR:
                raise EngineFailure(row.detail)
        return rows

    def reset(self, ids: Sequence[int]) -> None:
        """After an exception: forget the requests `ids`, and whatever step was interrupted."""
        for id in ids:
            self.core.abort(id)
        self.core.lose_worker(time.monotonic())
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch = msgspec.structs.replace(self._epoch, count=self._epoch.count + 1)
        self.runner.configure(configuration(self.limits, self._epoch, self.limits.num_blocks))
        self.core.begin_epoch(self._epoch, self.limits.num_blocks)

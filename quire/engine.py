"""`InProcessEngine`: the scheduler's engine and the worker's runner in the caller's process, without sockets.

They exchange the same values as the services do: plan, result, commit. On a CPU one plan is in flight at a time (for
each pipeline stage), since one process cannot plan and compute at the same time; a GPU gets the next plan while it
computes one. If several ranks compute the model, the others are processes (`group_runner.py`).
"""

import time
from collections import deque
from collections.abc import Iterable

import torch
from msgspec.structs import replace

from quire.group_runner import GroupRunner
from quire.startup_checks import check_architecture
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import Limits
from services.scheduler.engine import Engine
from services.worker.config import WorkerConfig
from services.worker.interface import PendingStep
from services.worker.start import start_runner
from shared.errors import EngineFailure, InvalidRequest, ModelError
from shared.hub.checkpoint import locate
from shared.protocol import AdapterLoaded, AdapterRefused, LoadAdapter, ModelInfo, ProgressRow, Submit, UnloadAdapter

UNBOUNDED = 2**31 - 1  # requests that may wait: a bound would save nothing, since the caller holds them in memory


class InProcessEngine:
    """Loads the model, then runs the submitted requests step by step. It is not thread-safe."""

    def __init__(self, scheduler: SchedulerConfig, worker: WorkerConfig) -> None:
        if worker.parallel.world_size > 1:
            check_architecture(locate(worker.model, worker.revision, worker.download_dir), worker)
        self.runner = GroupRunner(worker) if worker.parallel.world_size > 1 else start_runner(worker)
        self._worker_info = self.runner.info
        on_cpu = self._worker_info.device.startswith("cpu")
        config = replace(scheduler, max_num_queued_reqs=UNBOUNDED)
        if config.max_step_ms is None:
            config = replace(config, max_step_ms=0.0)  # nobody reads along
        if on_cpu:
            config = replace(config, async_scheduling=False)
        self._max_in_flight = self._worker_info.num_stages + config.async_scheduling
        self._in_flight: deque[PendingStep] = deque()
        self._rows: list[ProgressRow] = []  # that `step` has not returned
        self._refused: dict[int, str] = {}  # why adapters could not be loaded, by their numbers
        self.engine = Engine(config, self._worker_info)
        self._begin_epoch()

    @property
    def model(self) -> ModelInfo:
        return self.engine.model

    @property
    def limits(self) -> Limits:
        return self.engine.limits

    def submit(self, request: Submit) -> None:
        """Queue a request. Raise `InvalidRequest` if it could never run."""
        if refused := self.engine.submit(request, time.monotonic()):
            raise InvalidRequest(refused.detail)

    def abort(self, id: int, sample: int = -1) -> None:
        """End a request, or one sample of it."""
        self.engine.abort(id, sample)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks."""
        self.engine.reset_prefix_cache()

    def add_adapter(self, name: str, path: str, *, replaces: bool) -> str:
        """Load an adapter, which requests can name then. Return why that cannot be done; empty if it was.

        Steps in flight are finished first: they may name the last adapter of requests that have ended, which has to go.
        """
        while self._in_flight:
            self._rows += self._finish_step()
        added = self.engine.add_adapter(name, path, replaces=replaces)
        if isinstance(added, str):
            return added
        self._update_adapters()
        return self._refused.pop(added, "")

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that use it go on."""
        self.engine.remove_adapter(name)
        self._update_adapters()

    def step(self) -> list[ProgressRow]:
        """Finish one step. Return its progress. Raise `EngineFailure` if no request can run."""
        while len(self._in_flight) < self._max_in_flight:
            plan = self.engine.plan(time.monotonic())
            were_loaded = self._update_adapters()
            if plan is not None:
                self._in_flight.append(self.runner.launch(plan))
            elif not were_loaded:  # otherwise requests may have waited for them
                break
        rows, self._rows = self._rows, []
        if self._in_flight:
            return rows + self._finish_step()
        if not rows:
            raise EngineFailure(f"no request can run, although some are unfinished: {self.engine.snapshot}")
        return rows

    def _finish_step(self) -> list[ProgressRow]:
        return self.engine.commit(self._in_flight.popleft().result())

    def close(self) -> None:
        """Free the model's memory. Nothing may be called after that."""
        self._in_flight.clear()
        self.runner.close()
        del self.runner
        torch.cuda.empty_cache()  # so that another engine of this process finds the memory free

    def reset(self, ids: Iterable[int]) -> None:
        """Forget the requests `ids` and all steps in flight."""
        for id in ids:
            self.engine.abort(id)
        self.engine.lose_worker(time.monotonic())
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Let the engine configure the runner, as after a worker's registration."""
        self._in_flight.clear()
        self.runner.configure(self.engine.configure(self._worker_info))
        self._update_adapters()

    def _update_adapters(self) -> bool:
        """Let the runner load and unload what the engine says. Return whether there was anything to load."""
        were_loaded = False
        while messages := self.engine.take_adapter_messages():
            for message in messages:
                if isinstance(message, UnloadAdapter):
                    self.runner.unload_adapter(message.adapter)
                else:
                    were_loaded = True
                    self._rows += self.engine.finish_load(self._load(message))
        return were_loaded

    def _load(self, message: LoadAdapter) -> AdapterLoaded | AdapterRefused:
        try:
            return AdapterLoaded(message.adapter, self.runner.load_adapter(message.adapter, message.path))
        except ModelError as error:
            self._refused[message.adapter] = str(error)
            return AdapterRefused(message.adapter, str(error))

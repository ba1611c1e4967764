"""`Engine`: the core together with the model that it serves, on one worker after the other.

The scheduler service drives it over sockets, and `quire.engine` inside the caller's process. It knows no sockets and no
clock, like the core that it wraps.
"""

import logging
import secrets
from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from services.scheduler.config import (
    SchedulerConfig,
    WorkerCapacity,
    bytes_per_block,
    count_blocks,
    count_host_blocks,
    make_configure,
    make_limits,
    pool_tokens,
    swap_seconds,
)
from services.scheduler.core import Scheduler, WorkerResources
from services.scheduler.recorder import RecordedScheduler, Recorder
from shared.log_format import of_request, of_requests
from shared.protocol import (
    VERSION,
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    Configure,
    Epoch,
    LoadAdapter,
    ProgressRow,
    Refused,
    Snapshot,
    StepPlan,
    StepResult,
    Submit,
    UnloadAdapter,
    Welcome,
    encode,
)

logger = logging.getLogger(__name__)


class Engine:
    """A replica of a model.

    The first worker decides the model and the limits; later workers have to match them. Raise `ConfigError` if the
    first worker's memory is too small, or if nothing can be recorded in the folder that was asked for.
    """

    def __init__(self, config: SchedulerConfig, worker: WorkerCapacity) -> None:
        self._config = config
        self.model = worker.model
        self.limits = make_limits(config, worker)
        self._takes_adapters = False  # whether a worker has taken some, which requests may name since then
        self._core = self._make_core()
        self._epoch = Epoch(secrets.token_hex(8), 0)
        self._block_bytes = 0  # of a block of the last worker
        self._warn_of_reduced_context()

    @property
    def unfinished(self) -> Collection[int]:
        """The ids of all requests that have not ended: a view, which changes with them."""
        return self._core.unfinished

    @property
    def snapshot(self) -> Snapshot:
        return replace(self._core.snapshot(), block_bytes=self._block_bytes)

    @property
    def welcome(self) -> Welcome:
        """The answer to a gateway's `Hello`."""
        return Welcome(
            version=VERSION,
            engine=self._config.engine,
            boot_id=self._epoch.boot_id,
            model=self.model,
            max_model_len=self.limits.max_model_len,
            max_num_seqs=self.limits.max_num_seqs,
            adapters=self.adapters,
        )

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests can name."""
        return self._core.adapters

    def mismatch(self, worker: WorkerCapacity) -> str:
        """Return why a worker cannot take over; empty if it can."""
        if worker.model.fingerprint != self.model.fingerprint:
            logger.warning("a new worker computes differently from the former: continued outputs may differ")
        if replace(worker.model, fingerprint=self.model.fingerprint) != self.model:
            return "it has loaded another model than this engine serves"
        if worker.num_stages != self.limits.num_stages:
            return f"it has {worker.num_stages} pipeline stages, but this engine began with {self.limits.num_stages}"
        capacity, promised = pool_tokens(self._config, worker), self.limits.max_model_len
        if capacity < promised:
            return f"its memory holds {capacity} tokens, but requests of {promised} were promised to be served"
        if self._takes_adapters and not worker.max_loras:
            return "it takes no adapters, but this engine has some"
        return ""

    def configure(self, worker: WorkerCapacity) -> Configure:
        """Begin an epoch with this worker, and return the message that configures it."""
        num_blocks, num_host_blocks = count_blocks(self._config, worker), count_host_blocks(self._config, worker)
        self._epoch = replace(self._epoch, count=self._epoch.count + 1)
        self._block_bytes = bytes_per_block(self._config, worker)
        self._takes_adapters |= worker.max_loras > 0
        resources = WorkerResources(
            step_seconds=worker.step_seconds,
            token_seconds=worker.token_seconds,
            num_host_blocks=num_host_blocks,
            swap_seconds=swap_seconds(self._config, worker),
            max_loras=worker.max_loras,
            max_cpu_loras=worker.max_cpu_loras,
        )
        self._core.begin_epoch(self._epoch, num_blocks, resources)
        return make_configure(self.limits, self._epoch, num_blocks, num_host_blocks)

    def submit(self, request: Submit, now: float) -> Refused | None:
        """Accept a request, or return why not."""
        refused = self._core.submit(request, now)
        extra = of_request(request.request_id)
        if refused is not None:
            logger.debug("a request is refused: %s", refused.detail, extra=extra)
        elif request.suspicion.deaths_alone:
            deaths = request.suspicion.deaths_alone
            logger.warning("a request comes as a suspect; deaths alone so far: %d", deaths, extra=extra)
        return refused

    def abort(self, id: int, sample: int = -1) -> list[ProgressRow]:
        """End a request, or one sample of it. Return the last rows of the samples that this ended."""
        return self._core.abort(id, sample)

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed or enough is in flight."""
        return self._core.plan(now)

    def encode(self, plan: StepPlan) -> bytes:
        """Return the message of the plan that was made last."""
        return self._core.encoded_plan if isinstance(self._core, RecordedScheduler) else encode(plan)

    def commit(self, result: StepResult, encoded: bytes = b"") -> list[ProgressRow]:
        """Apply a step's result and return the new output. Raise `ProtocolError` if it does not answer the plan.

        `encoded` is the message in which it came, if it came in one.
        """
        if isinstance(self._core, RecordedScheduler):
            rows = self._core.commit(result, encoded)
        else:
            rows = self._core.commit(result)
        if logger.isEnabledFor(logging.DEBUG):
            self._log_scheduling(rows)
        return rows

    def lose_worker(self, now: float, *, out_of_memory: bool = False) -> list[ProgressRow]:
        """Put running sequences back into the queue.

        Return the last rows of a request that killed workers, and a row without tokens for each new suspect.
        """
        request_ids, suspects = self._core.request_ids, self._core.suspects
        rows = self._core.lose_worker(now, out_of_memory=out_of_memory)
        if suspects:
            logger.warning("the worker was lost with %d suspects", len(suspects), extra=of_requests(suspects))
        self._log_ends(rows, request_ids)
        return rows

    def end_epoch(self) -> None:
        """Let the worker go, which has answered every plan: running sequences wait for the next one."""
        self._core.end_epoch()

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks."""
        logger.info("the prefix cache is reset")
        self._core.reset_prefix_cache()

    def add_adapter(self, name: str, path: str, *, replaces: bool = False) -> int | str:
        """Have an adapter loaded. Return the number by which `finish_load` is told how that went, or why it is not."""
        return self._core.add_adapter(name, path, replaces=replaces)

    def remove_adapter(self, name: str) -> str:
        """Let no new request name an adapter. Return why that cannot be done; empty if it was."""
        error = self._core.remove_adapter(name)
        if not error:
            logger.info("the adapter %s is removed", name)
        return error

    def finish_load(self, answer: AdapterLoaded | AdapterRefused) -> list[ProgressRow]:
        """Apply a worker's answer. Return the last rows of the requests that cannot go on without that adapter."""
        request_ids, before = self._core.request_ids, self.adapters
        if isinstance(answer, AdapterLoaded):
            rows = self._core.adapter_loaded(answer.adapter, answer.digest)
        else:
            rows = self._core.adapter_refused(answer.adapter, answer.detail)
            logger.warning("an adapter cannot be loaded: %s", answer.detail)
        for adapter in self.adapters:
            if adapter not in before:
                logger.info("the adapter %s is loaded from %s", adapter.name, adapter.path)
        self._log_ends(rows, request_ids)
        return rows

    def take_adapter_messages(self) -> list[LoadAdapter | UnloadAdapter]:
        """Return what the worker has to be told about adapters before the next plan."""
        return self._core.take_adapter_messages()

    def drain(self) -> None:
        """Accept no new requests from now on."""
        self._core.drain()

    def end_record(self) -> None:
        """Complete the record, if there is one. Nothing may be called after that."""
        if isinstance(self._core, RecordedScheduler):
            self._core.end_record()

    @property
    def request_ids(self) -> dict[int, str]:
        """The ids that clients see of all requests that have not ended, by their ids here."""
        return self._core.request_ids

    def _log_ends(self, rows: Iterable[ProgressRow], request_ids: Mapping[int, str]) -> None:
        """Log the requests that the engine has ended, one line for all samples of each."""
        ended = {row.id: row.detail for row in rows if row.finish_reason is not None}
        for id, detail in ended.items():
            logger.error("a request is ended: %s", detail, extra=of_request(request_ids[id]))

    def _log_scheduling(self, rows: Iterable[ProgressRow]) -> None:
        """Log the rows that say how a sequence is treated: when it has run for the first time, or again."""
        request_ids = self._core.request_ids
        for row in rows:
            if row.scheduling is not None and row.id in request_ids:
                logger.debug(
                    "sample %d runs, after %.3f s in the queue and %d preemptions",
                    row.sample,
                    row.scheduling.queued_seconds,
                    row.scheduling.preemptions,
                    extra=of_request(request_ids[row.id]),
                )

    def _make_core(self) -> Scheduler:
        if not self._config.record:
            return Scheduler(self.limits)
        recorder = Recorder(self._config.record, self._config.engine, self.model.name)
        return RecordedScheduler(self.limits, recorder)

    def _warn_of_reduced_context(self) -> None:
        max_model_len, max_positions = self.limits.max_model_len, self.model.max_positions
        requested = self._config.max_model_len or max_positions
        if max_model_len < requested:
            reason = (
                "the KV memory holds no more" if max_model_len < max_positions else "the model was made for no more"
            )
            logger.warning("max_model_len is reduced from %d to %d: %s", requested, max_model_len, reason)

"""`Engine`: the core together with the worker group that it was made for, across the group's deaths.

It turns a worker's `Register` into limits and epochs. It knows no sockets and no clock, like the core that it wraps.
"""

import logging
import secrets

import msgspec

from services.scheduler.config import SchedulerConfig, configuration, count_blocks, limits, pool_tokens
from services.scheduler.core import Scheduler
from services.scheduler.validity import fault
from shared.protocol import (
    VERSION,
    Configure,
    Epoch,
    ModelInfo,
    ProgressRow,
    Refusal,
    Refused,
    Register,
    Snapshot,
    StepPlan,
    StepResult,
    Submit,
    Welcome,
)

log = logging.getLogger(__name__)


class Engine:
    """One replica of a model. Until the first worker has come, there is nothing to schedule for."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._core: Scheduler | None = None
        self._model: ModelInfo | None = None
        self._epoch = Epoch(secrets.token_hex(8), 0)
        self._draining = False

    @property
    def model(self) -> str:
        """Folder or name of the model; empty before the first worker has come."""
        return self._model.name if self._model else ""

    @property
    def idle(self) -> bool:
        """No request is unfinished."""
        return self._core is None or self._core.idle

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot() if self._core is None else self._core.snapshot()

    def unsuitable(self, worker: Register) -> str:
        """Return why a worker cannot go on with what this engine serves; empty if it can. The first one always can."""
        if self._model is None or self._core is None:
            return ""
        if self._differs(worker, self._model):
            return "it has loaded another model than this engine serves"
        tokens, promised = pool_tokens(self._config, worker), self._core.limits.max_model_len
        if tokens < promised:
            return f"its memory holds {tokens} tokens, but requests of {promised} were promised to be served"
        return ""

    @staticmethod
    def _differs(worker: Register, model: ModelInfo) -> bool:
        if model.fingerprint != worker.model.fingerprint:
            log.warning("a new worker computes differently from the former: continued outputs may differ")
        return msgspec.structs.replace(worker.model, fingerprint=model.fingerprint) != model

    def configure(self, worker: Register) -> Configure:
        """Begin an epoch with this worker. Raises `ConfigError` if its memory is too small."""
        core = self._core or self._begin(worker)
        num_blocks = count_blocks(self._config, worker)
        self._epoch = Epoch(self._epoch.boot_id, self._epoch.count + 1)
        core.begin_epoch(self._epoch, num_blocks)
        return configuration(core.limits, self._epoch, num_blocks)

    def welcome(self) -> Welcome | None:
        """What gateways need to know; None before the first worker has come."""
        if self._core is None or self._model is None:
            return None
        return Welcome(
            version=VERSION,
            engine=self._config.engine,
            boot_id=self._epoch.boot_id,
            model=self._model,
            max_model_len=self._core.limits.max_model_len,
            max_num_seqs=self._core.limits.max_num_seqs,
        )

    def submit(self, request: Submit, now: float) -> Refused | None:
        """Accept a request, or say why not."""
        if self._core is None or self._model is None:
            return Refused(request.id, Refusal.DRAINING, "the engine has not started yet")
        if found := fault(request, self._model.vocab_size):
            return Refused(request.id, Refusal.INVALID, found)
        return self._core.submit(request, now)

    def abort(self, id: int, sample: int) -> list[ProgressRow]:
        return [] if self._core is None else self._core.abort(id, sample)

    def plan(self, now: float) -> StepPlan | None:
        return None if self._core is None else self._core.plan(now)

    def commit(self, result: StepResult) -> list[ProgressRow]:
        """News of a step. Raises `ProtocolError` if the result does not answer the plan."""
        return [] if self._core is None else self._core.commit(result)

    def lose_worker(self, now: float) -> list[ProgressRow]:
        """The worker is gone; what ran waits for the next one. Returns the ends of requests that are at fault."""
        return [] if self._core is None else self._core.lose_worker(now)

    def drain(self) -> None:
        """Take no new requests from now on."""
        self._draining = True
        if self._core is not None:
            self._core.drain()

    def _begin(self, worker: Register) -> Scheduler:
        made = limits(self._config, worker)
        wanted = self._config.max_model_len or worker.model.max_positions
        if made.max_model_len < wanted:
            tight = made.max_model_len < worker.model.max_positions
            reason = "the KV memory holds no more" if tight else "the model was made for no more"
            log.warning("max_model_len is reduced from %d to %d: %s", wanted, made.max_model_len, reason)
        self._model = worker.model
        core = self._core = Scheduler(made)
        if self._draining:
            core.drain()
        return core

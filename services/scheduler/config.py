"""The scheduler's settings, and functions that derive `Limits` and `Configure` from them and a worker."""

from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

from services.scheduler.core import Limits, check_settings
from services.scheduler.core.step_time import MIN_SHARE
from shared.config import (
    CPU_PREFILL_TOKENS,
    MAX_NUM_SEQS,
    MAX_SECONDS,
    AdminPort,
    DrainTimeout,
    Insecure,
    LogFormat,
    LogLevel,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Supervisor,
    SupervisorAddress,
    ZmqKeys,
    tokens_of_largest_step,
)
from shared.errors import ConfigError
from shared.protocol import Configure, Epoch, ModelInfo

MAX_BLOCKS = 2**21
"""Maximum number of blocks of a pool. This process keeps some 100 bytes for each, and sequences that run together
hardly use more than 33 million tokens of context."""


CPU_STEP_MS = 100.0
"""`max_step_ms` on a CPU, if unset: ten tokens a second are faster than most people read."""

MAX_PREFILL_TOKENS = 2048
"""Maximum prompt tokens in a step that follow from a fast machine."""


class WorkerCapacity(Protocol):
    """A worker's model, its speed, and the memory that it has for KV.

    `Register` has these fields, and so has a runner's info.
    """

    @property
    def model(self) -> ModelInfo: ...
    @property
    def device(self) -> str: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def kv_memory(self) -> int: ...
    @property
    def step_seconds(self) -> float: ...
    @property
    def token_seconds(self) -> float: ...
    @property
    def host_kv_memory(self) -> int: ...
    @property
    def swap_bytes_per_second(self) -> float: ...
    @property
    def max_loras(self) -> int: ...
    @property
    def max_cpu_loras(self) -> int: ...
    @property
    def num_stages(self) -> int: ...


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Settings of one scheduler. Raise `ConfigError` for those that cannot work together."""

    gateways: Annotated[str, Meta(description="Address to bind for gateways (ipc:// or tcp://).")] = (
        "tcp://127.0.0.1:5557"
    )
    workers: Annotated[str, Meta(description="Address to bind for workers (ipc:// or tcp://).")] = (
        "tcp://127.0.0.1:5558"
    )
    engine: Annotated[str, Meta(min_length=1, description="Name of this engine in metrics and logs.")] = "0"
    max_model_len: MaxModelLen = None
    max_num_seqs: MaxNumSeqs = MAX_NUM_SEQS
    max_num_batched_tokens: MaxNumBatchedTokens = None
    max_step_ms: Annotated[
        Annotated[float, Meta(ge=0, le=600_000)] | None,
        Meta(
            description="Milliseconds that a step should take at most while answers are streamed: it has as many "
            "tokens of prompts as fit by the measured times, but 16 for each prompt in line, up to 128; 0: no such "
            "bound; unset: 100 on a CPU, 0 on a GPU."
        ),
    ] = None
    block_size: Annotated[Literal[8, 16, 32, 64, 128, 256], Meta(description="Tokens in a block of KV memory.")] = 16
    num_gpu_blocks_override: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_BLOCKS)] | None,
        Meta(description="Blocks of KV memory, on any device, instead of what its memory allows."),
    ] = None
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV of prompts with a common beginning.")] = True
    preemption_mode: Annotated[
        Literal["auto", "swap", "recompute"],
        Meta(
            description="What happens to the KV of a preempted sequence: it is copied to host memory (swap) if there "
            "is room, or computed again; auto: whichever takes less time by what the worker has measured."
        ),
    ] = "auto"
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], Meta(description="Order of the queue: arrival alone, or priority before it.")
    ] = "fcfs"
    priority_ageing: Annotated[
        float,
        Meta(ge=0, le=1e9, description="Seconds of waiting that one unit of priority is worth; 0: priority is strict."),
    ] = 0.0
    max_num_queued_reqs: Annotated[
        int, Meta(ge=1, description="Samples waiting before new requests get status 429.")
    ] = 1024
    max_num_queued_tokens: Annotated[
        int, Meta(ge=0, description="Tokens waiting before new requests get status 429; 0: no such bound.")
    ] = 0
    lora_modules: Annotated[
        list[str],
        Meta(
            description="Adapters to load at the start, each as NAME=PATH or as a JSON object with name and path; "
            "needs --enable-lora. Requests name one as their model."
        ),
    ] = []
    async_scheduling: Annotated[
        bool,
        Meta(
            description="Plan the next step while one is running, so that the device never waits; with pipeline "
            "stages, one more than there are stages."
        ),
    ] = True
    worker_timeout: Annotated[
        float,
        Meta(
            ge=1,
            le=MAX_SECONDS,
            description="Seconds without a sign of life after which a worker is given up; a step gets 8 times its "
            "predicted duration if that is more, and longer while it is seen to compute or to wait for a CPU.",
        ),
    ] = 2.0
    drain_timeout: DrainTimeout = 30.0
    admin_port: AdminPort = 0
    metrics_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the scheduler's own /metrics and /health; 0: none.")
    ] = 0
    record: Annotated[
        str,
        Meta(
            description="Folder for a record of the last requests and steps, which `quire replay` reads; it holds the "
            "token ids of prompts and outputs. Empty: none."
        ),
    ] = ""
    zmq_keys: ZmqKeys = ""
    insecure: Insecure = False
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    supervisor: Supervisor = 0
    supervisor_address: SupervisorAddress = ""

    def __post_init__(self) -> None:
        check_settings(self.max_num_batched_tokens, self.max_num_seqs, self.scheduling_policy, self.priority_ageing)


def make_limits(config: SchedulerConfig, worker: WorkerCapacity) -> Limits:
    """Return the core's limits for an engine with this worker. Raise `ConfigError` if its memory is too small."""
    num_blocks = count_blocks(config, worker)
    max_positions = worker.model.max_positions
    requested = min(config.max_model_len or max_positions, max_positions)
    return Limits(
        vocab_size=worker.model.vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=_max_num_batched_tokens(config, worker),
        max_step_seconds=_max_step_ms(config, worker) / 1000,
        max_model_len=min(requested, num_blocks * config.block_size),
        max_queued_requests=config.max_num_queued_reqs,
        max_queued_tokens=config.max_num_queued_tokens,
        prefix_caching=config.enable_prefix_caching,
        preemption_mode=config.preemption_mode,
        depth=worker.num_stages + config.async_scheduling,
        num_stages=worker.num_stages,
        policy=config.scheduling_policy,
        priority_ageing=config.priority_ageing,
    )


def _max_step_ms(config: SchedulerConfig, worker: WorkerCapacity) -> float:
    if config.max_step_ms is not None:
        return config.max_step_ms
    return CPU_STEP_MS if worker.device.startswith("cpu") else 0.0


def _max_num_batched_tokens(config: SchedulerConfig, worker: WorkerCapacity) -> int:
    """Return the tokens that a step may have. If unset, a machine that is fast for its model takes more than others."""
    tokens = tokens_of_largest_step(config.max_num_batched_tokens, config.max_num_seqs, worker.device)
    if config.max_num_batched_tokens is not None:
        return tokens
    # the least cost of a token that `StepTime` believes, too
    token_seconds = max(worker.token_seconds, MIN_SHARE * worker.step_seconds, 1e-9)
    fitting = int(min(_max_step_ms(config, worker) / 1000 / token_seconds, MAX_PREFILL_TOKENS))
    return max(tokens, config.max_num_seqs + fitting // CPU_PREFILL_TOKENS * CPU_PREFILL_TOKENS)


def count_blocks(config: SchedulerConfig, worker: WorkerCapacity) -> int:
    """Return the number of blocks of the worker's pool. Raise `ConfigError` if its memory holds none."""
    num_blocks = _num_blocks(config, worker)
    if num_blocks < 1:
        block_bytes = bytes_per_block(config, worker)
        raise ConfigError(
            f"the worker has {worker.kv_memory} bytes for KV, but one block takes {block_bytes}: it needs a larger "
            "--kv-cache-memory or --gpu-memory-utilization, or a smaller --block-size"
        )
    return num_blocks


def pool_tokens(config: SchedulerConfig, worker: WorkerCapacity) -> int:
    """Return the number of tokens that the worker's pool holds; 0 if its memory holds no block."""
    return _num_blocks(config, worker) * config.block_size


def _num_blocks(config: SchedulerConfig, worker: WorkerCapacity) -> int:
    affordable = worker.kv_memory // bytes_per_block(config, worker)
    return config.num_gpu_blocks_override or min(affordable, MAX_BLOCKS)


def count_host_blocks(config: SchedulerConfig, worker: WorkerCapacity) -> int:
    """Return the number of blocks in the worker's host memory: as many as it has room for, if they are of any use."""
    if config.preemption_mode == "recompute" and not config.enable_prefix_caching:
        return 0
    return min(worker.host_kv_memory // bytes_per_block(config, worker), MAX_BLOCKS)


def bytes_per_block(config: SchedulerConfig, worker: WorkerCapacity) -> int:
    """Return the bytes of a block, in all layers."""
    return worker.kv_bytes_per_token * config.block_size


def swap_seconds(config: SchedulerConfig, worker: WorkerCapacity) -> float:
    """Return the seconds in which the worker copies a block to host memory, or back; 0 if it has not measured that."""
    bandwidth = worker.swap_bytes_per_second
    return bytes_per_block(config, worker) / bandwidth if bandwidth else 0.0


def make_configure(limits: Limits, epoch: Epoch, num_blocks: int, num_host_blocks: int) -> Configure:
    """Return the message that begins `epoch` at a worker whose pool has `num_blocks` blocks."""
    return Configure(
        epoch=epoch,
        block_size=limits.block_size,
        num_blocks=num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_host_blocks=num_host_blocks,
    )

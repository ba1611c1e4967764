"""The worker's settings.

A process needs them to load a model and to find its scheduler. The scheduler decides the sizes of the KV pool and of a
step (`Configure`); those of a step are settings here too, since a GPU must have memory for it beside the KV pool.
"""

from typing import Annotated, Literal

from msgspec import Meta

from services.worker.parallel_config import MAX_TENSOR_PARALLEL_SIZE, ParallelConfig
from shared.config import (
    MAX_NUM_SEQS,
    MAX_SECONDS,
    Insecure,
    LogFormat,
    LogLevel,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ModelConfig,
    Supervisor,
    SupervisorAddress,
    ZmqKeys,
)
from shared.errors import ConfigError


class WorkerConfig(ModelConfig, frozen=True, kw_only=True):
    """Settings of one worker rank."""

    scheduler: Annotated[str, Meta(description="Address at which the scheduler listens for workers.")] = (
        "tcp://127.0.0.1:5558"
    )
    zmq_keys: ZmqKeys = ""
    insecure: Insecure = False
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Device to run on; auto takes a GPU if there is one.")
    ] = "auto"
    instruction_set: Annotated[
        Literal["auto", "amx", "avx512_bf16", "avx512", "avx_vnni", "avx2", "none"],
        Meta(
            description="Instruction set that the kernels use on a CPU; auto: the best that it has; none: plain torch "
            "operations instead of kernels."
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float", "bfloat16", "float16", "half"],
        Meta(
            description="Type of weights that are not quantised; auto: the checkpoint's on a GPU, float32 on a CPU, "
            "which computes in float32 whatever the type, and keeps matrices of 16 bits at their size."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "auto", "gguf", "gptq", "awq", "squeezellm", "int8", "int4"],
        Meta(
            description="How weights are quantised on a CPU: as in the GGUF file, GPTQ, AWQ or SqueezeLLM checkpoint, "
            "or to int8 or int4 when they are loaded; matmuls then round activations to 8 bits. auto: as in the "
            "checkpoint if possible; none if --dtype is set."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"],
        Meta(
            description="Type of keys and values in the KV cache; auto: that of the weights, or bfloat16 if they are "
            "quantised. int8 and fp8 (e4m3) have a scale for each token and head; fp8 needs a GPU of compute "
            "capability 8.9 or newer."
        ),
    ] = "auto"
    tokenizer: Annotated[
        str,
        Meta(description="Folder or Hugging Face name of a tokenizer and chat template to use instead of the model's."),
    ] = ""
    tokenizer_revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of the tokenizer that --tokenizer names.")
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "pt", "gguf", "dummy"],
        Meta(description="Format of the weight files to read; auto prefers safetensors, dummy makes random weights."),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "quire", "transformers"],
        Meta(
            description="Code that computes the model: Quire's own, or transformers'; auto takes transformers' if "
            "Quire has none for the architecture, or lacks a feature that the checkpoint needs."
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        Meta(
            description="Make a token's bits on a GPU depend on its own sequence alone, not on other requests, chunks "
            "or preemptions; it costs speed. On a CPU with the compiled kernels they always do. Needs a family of "
            "Quire's own."
        ),
    ] = False
    enable_lora: Annotated[bool, Meta(description="Take adapters (LoRA), which requests can name.")] = False
    max_loras: Annotated[int, Meta(ge=1, le=1024, description="Adapters that the requests of one step may use.")] = 1
    max_lora_rank: Annotated[
        int, Meta(ge=1, le=512, description="Largest rank of an adapter; memory is taken for it.")
    ] = 16
    max_cpu_loras: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Adapters kept in the host's memory, at least max-loras; unset: as many as those."),
    ] = None
    max_model_len: MaxModelLen = None
    max_num_seqs: MaxNumSeqs = MAX_NUM_SEQS
    max_num_batched_tokens: MaxNumBatchedTokens = None
    enforce_eager: Annotated[
        bool,
        Meta(description="Launch decodes kernel by kernel on a GPU, without CUDA graphs: less memory, and slower."),
    ] = False
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Share of the GPU's memory that weights, activations and KV may take.")
    ] = 0.92
    kv_cache_memory: Annotated[
        Annotated[float, Meta(gt=0, le=65_536)] | None,
        Meta(description="GiB for KV; unset: what gpu-memory-utilization leaves, or a share of the host's memory."),
    ] = None
    swap_space: Annotated[
        Annotated[float, Meta(ge=0, le=65_536)] | None,
        Meta(
            description="GiB of host memory for the KV of preempted sequences and of prefixes that the device has no "
            "room for; 0: none; unset: 4, but at most an eighth of the free memory."
        ),
    ] = None
    num_threads: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        Meta(description="Threads for computing on a CPU; unset: every core, or a worker's part of them."),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1, le=MAX_TENSOR_PARALLEL_SIZE, description="Ranks that divide each layer of the model among them."),
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="Stages, which have consecutive layers of the model each.")
    ] = 1
    rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Number of this worker among the ranks that compute the model together; unset: it starts all "
            "of them on this machine."
        ),
    ] = None
    rendezvous: Annotated[
        str,
        Meta(
            description="Where the ranks find each other: host:port of the host of rank 0, or a folder if all are on "
            "one host."
        ),
    ] = ""
    local_rank: Annotated[
        int, Meta(ge=0, description="Number of this worker among those of this machine that share its CPUs.")
    ] = 0
    local_world_size: Annotated[
        int, Meta(ge=1, description="Workers of this machine; each takes its part of the CPUs and of the memory.")
    ] = 1
    scheduler_timeout: Annotated[
        float,
        Meta(
            ge=1,
            le=MAX_SECONDS,
            description="Seconds that a worker keeps its weights without a scheduler, and that one step may take at "
            "most, before the process ends itself.",
        ),
    ] = 300.0
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    supervisor: Supervisor = 0
    supervisor_address: SupervisorAddress = ""

    def __post_init__(self) -> None:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"--max-cpu-loras {self.max_cpu_loras} is less than --max-loras {self.max_loras}")
        if self.rank is None and self.rendezvous:
            raise ConfigError(f"--rendezvous {self.rendezvous}: --rank must say which rank this is")
        if self.rank is not None and self.rank >= self.parallel.world_size:
            raise ConfigError(f"--rank {self.rank}: there are {self.parallel.world_size} ranks, the first is 0")

    @property
    def parallel(self) -> ParallelConfig:
        """This rank's place among those that compute the model together; that of the first if none is set."""
        return ParallelConfig(self.rank or 0, self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def num_host_adapters(self) -> int:
        """The adapters that host memory may hold."""
        return self.max_cpu_loras or self.max_loras

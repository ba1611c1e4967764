"""Starts a worker: tunes the process, loads the model and warms up its runner.

`python -m services.worker` and the offline engine both start here.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from kernels.cpu import extension
from kernels.load import ops as load_ops
from kernels.ops import Ops
from services.worker.config import WorkerConfig
from services.worker.cpu_tuning import (
    allocate_huge_pages,
    keep_freed_memory,
    return_freed_memory,
    set_threads,
    take_cpus,
    use_huge_pages,
)
from services.worker.decode_graphs import Capture, cuda_capture, repeat
from services.worker.models.decoder.decoder import Decoder
from services.worker.models.load import LoadedModel, choose_device, load_model
from services.worker.parallel_config import parse_rendezvous
from services.worker.runner import ModelRunner
from shared.errors import ConfigError
from shared.hub.checkpoint import locate, locate_tokenizer, text_digest
from shared.hub.embedded import EMBEDDED
from shared.protocol import ModelInfo
from shared.text.grammars import GrammarCompiler
from shared.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def start_runner(config: WorkerConfig) -> ModelRunner:
    """Load a model and return its warm runner. Raise ModelError or ConfigError if it cannot be found, loaded or run."""
    if config.parallel.world_size > 1:
        parse_rendezvous(config.rendezvous)  # the ranks meet later: do not load a model in vain
    device = tune_process(config)
    ops = choose_ops(device, config)
    folder = locate(config.model, config.revision, config.download_dir)
    compiler = _load_compiler(folder, config)  # takes less time than the weights
    loaded = load(folder, config, device, ops)
    new_capture = choose_capture(loaded, ops, device, config)
    if device.type == "cuda":
        kernels = "Quire's kernels" if ops.supports_graphs else "plain torch operations"
        decodes = "in CUDA graphs" if new_capture else "kernel by kernel"
        logger.info("computing on %s with %s; decodes run %s", torch.cuda.get_device_name(device), kernels, decodes)
    if device.type == "cpu":
        instruction_set = extension.load()
        logger.info(
            "computing with %s", f"kernels for {instruction_set}" if instruction_set else "plain torch operations"
        )
    compiler.exception()  # which waits, so that nothing runs beside what is measured next
    info = model_info(loaded, config, folder)
    return ModelRunner(loaded, info, config, device, ops, new_capture=new_capture, load_compiler=compiler.result)


def tune_process(config: WorkerConfig) -> torch.device:
    """Set up memory, CPUs and threads of this process for a model, and return the device that the model goes to."""
    keep_freed_memory()
    device = choose_device(config.device)
    if device.type == "cpu":
        allocate_huge_pages()
        take_cpus(config.local_rank, config.local_world_size)
    set_threads(config.num_threads, config.local_world_size)
    return device


def load(folder: Path, config: WorkerConfig, device: torch.device, ops: Ops) -> LoadedModel:
    """Load the model in `folder`, and leave memory as steps want it, before the runner measures its speed."""
    loaded = load_model(folder, config, device, ops)
    if device.type == "cpu":
        return_freed_memory()
        use_huge_pages()
    return loaded


def _load_compiler(folder: Path, config: WorkerConfig) -> Future[GrammarCompiler]:
    """Begin to make the compiler of grammars for the model in `folder`, in a thread."""

    def load() -> GrammarCompiler:
        if not config.tokenizer:
            return GrammarCompiler(Tokenizer.load(folder))
        tokenizer = locate_tokenizer(config.tokenizer, config.tokenizer_revision, config.download_dir)
        return GrammarCompiler(Tokenizer.load(tokenizer, folder))

    thread = ThreadPoolExecutor(1)
    future = thread.submit(load)
    thread.shutdown(wait=False)
    return future


def choose_ops(device: torch.device, config: WorkerConfig) -> Ops:
    """Return the operations for `device`. Raise ConfigError if it has none that the settings allow."""
    if device.type == "cpu" and config.instruction_set != "auto":
        try:
            extension.choose(config.instruction_set)
        except ValueError as error:
            raise ConfigError(f"--instruction-set {error}") from error
    try:
        return load_ops(device, batch_invariant=config.batch_invariant)
    except ValueError as error:
        raise ConfigError(f"--batch-invariant {error}") from error


def choose_capture(
    loaded: LoadedModel, ops: Ops, device: torch.device, config: WorkerConfig
) -> Callable[[], Capture] | None:
    """Return what makes the capture of graphs of decodes; None: every step is launched kernel by kernel."""
    if config.enforce_eager or not ops.supports_graphs or not isinstance(loaded.model, Decoder):
        return None  # transformers' code may wait for the device, which no graph holds
    return cuda_capture if device.type == "cuda" else lambda: repeat


def model_info(loaded: LoadedModel, config: WorkerConfig, folder: Path) -> ModelInfo:
    """Return what other processes learn of the model that was loaded from `folder`."""
    shape = loaded.model.shape
    return ModelInfo(
        name=config.model or EMBEDDED,
        architecture=shape.architecture,
        dtype=loaded.precision.name,
        max_positions=shape.max_positions,
        vocab_size=shape.vocab_size,
        fingerprint=loaded.fingerprint,
        weights_digest=loaded.weights_digest,
        text_digest=text_digest(folder),
    )

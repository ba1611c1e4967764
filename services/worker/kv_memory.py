"""The memory that KV may take, in bytes. The scheduler computes the numbers of blocks from it."""

import logging

import torch

from services.worker.config import WorkerConfig
from services.worker.cpu_tuning import available_memory
from services.worker.warmup import StepMemory
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

GIB = 2**30
HOST_MAXIMUM = 4 * GIB
HOST_SHARE = 0.25
"""On a CPU, KV takes this share of the free memory, and at most `HOST_MAXIMUM` bytes, unless the user sets its size.

The workers of one machine divide the share among them, since each of them may measure the same free memory.
"""

SWAP_MAXIMUM = 4 * GIB
SWAP_SHARE = 0.125
"""Swapped blocks take this share of the host's free memory, at most `SWAP_MAXIMUM` bytes, unless the user sets that.

What the user sets for the KV of a CPU is not free.
"""


def host_kv_memory(config: WorkerConfig, device: torch.device) -> int:
    """Return the bytes of host memory for swapped blocks. Unless a GPU's are pinned, they are taken as needed."""
    if config.swap_space is not None:
        return int(config.swap_space * GIB)
    free = available_memory() / config.local_world_size
    if device.type == "cpu" and config.kv_cache_memory is not None:
        free = max(0.0, free - config.kv_cache_memory * GIB)
    return min(SWAP_MAXIMUM, int(free * SWAP_SHARE))


def kv_memory(config: WorkerConfig, device: torch.device, needed: StepMemory | None) -> int:
    """Return the bytes for KV on `device`, where the weights are loaded. Raise ConfigError if nothing is left.

    On a GPU, `needed` is the memory of steps beside the weights, as measured.
    """
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB)
    if needed is None:
        return min(HOST_MAXIMUM, int(available_memory() * HOST_SHARE / config.local_world_size))
    free, total = torch.cuda.mem_get_info(device)
    used = total - free  # by other processes too
    left = int(total * config.gpu_memory_utilization) - used - needed.total
    parts = {
        "in use after loading": used,
        "sequences and positions": needed.states,
        "the largest step": needed.activations,
        "graphs": needed.graphs,
        "KV": max(0, left),
    }
    text = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    logger.info("GPU memory, of %.1f GiB: %s", total / GIB, text)
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization} leaves no memory for KV. Of {total / GIB:.1f} "
            f"GiB: {text}. A smaller --max-num-batched-tokens, --max-num-seqs or --max-model-len needs less"
        )
    return left

"""The memory that KV may take, in bytes. The scheduler computes the number of blocks from it."""

import torch

from services.worker.config import WorkerConfig
from services.worker.cpu_tuning import available_memory
from shared.errors import ConfigError

GIB = 2**30
HOST_MAXIMUM = 4 * GIB
HOST_SHARE = 0.25
"""On a CPU, KV takes this share of the free memory, and at most `HOST_MAXIMUM` bytes, unless the user sets its size."""


def kv_memory(config: WorkerConfig, device: torch.device, activations: int) -> int:
    """Return the bytes for KV on `device`, where the weights are loaded. Raise ConfigError if nothing is left.

    `activations` are the bytes that a step takes at its peak beside the weights, as measured.
    """
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB)
    if device.type == "cpu":
        return min(HOST_MAXIMUM, int(available_memory() * HOST_SHARE))
    free, total = torch.cuda.mem_get_info(device)
    allowance = int(total * config.gpu_memory_utilization) - (total - free)
    left = allowance + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - activations
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization} leaves no memory for KV: "
            f"of {total / GIB:.1f} GiB {free / GIB:.1f} are free, and a step needs {activations / GIB:.1f}"
        )
    return left

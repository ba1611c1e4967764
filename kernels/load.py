"""Choice of a device's operations. A new device needs a folder like `kernels/reference`, and a case here."""

import hashlib
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import version as package_version
from pathlib import Path

import torch

from kernels.cpu import extension
from kernels.cpu import ops as cpu_ops
from kernels.ops import Ops
from kernels.reference import ops as reference_ops

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""The oldest GPUs that the Triton kernels are compiled for: Ampere."""

FP8_CAPABILITY = (8, 9)
"""The oldest GPUs that convert from and to float8_e4m3fn: Ada and Hopper."""


def ops(device: torch.device, *, batch_invariant: bool = False) -> Ops:
    """Return the operations for tensors on `device`. Raise ValueError if there are none for its type.

    With `batch_invariant`, the bits of a row depend on that row and its context alone; raise ValueError where no
    operations promise that. The CPU's always do.
    """
    match device.type:
        case "cpu":
            if interpreted(device):
                logger.warning("TRITON_INTERPRET=1: the GPU's kernels are interpreted, which is very slow")
                return gpu(batch_invariant=batch_invariant)
            if extension.load():
                return cpu_ops
            if batch_invariant:
                raise ValueError("needs the kernels compiled for this CPU; without them plain torch operations serve")
            return reference_ops
        case "cuda":
            if _has_gpu_kernels(device):
                return gpu(batch_invariant=batch_invariant)
            if batch_invariant:
                raise ValueError(f"needs a GPU from Ampere on, not {torch.cuda.get_device_name(device)}")
            logger.warning("%s has no kernels: plain torch operations serve", torch.cuda.get_device_name(device))
            return reference_ops
    raise ValueError(f"no kernels for device {device.type!r}")


def reference() -> Ops:
    """Return the reference operations, which run on any device."""
    return reference_ops


def interpreted(device: torch.device) -> bool:
    """Return whether `device` is a CPU that takes the GPU's kernels, for Triton's interpreter to run."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def gpu(*, batch_invariant: bool = False) -> Ops:
    """Return the operations of GPUs. Triton is imported here, since CPUs do without it."""
    from kernels.gpu import batch_invariant_ops
    from kernels.gpu import ops as gpu_ops

    if batch_invariant:
        return batch_invariant_ops
    return gpu_ops


def report_compilations(report: Callable[[str], None] | None) -> None:
    """Call `report` with a line for each GPU kernel that is compiled from now on; None: stop."""
    if "kernels.gpu.launch" in sys.modules:  # else no GPU kernels are used
        from kernels.gpu.launch import on_compile

        on_compile(report)


def kv_cache_dtypes(ops: Ops, device: torch.device) -> frozenset[torch.dtype]:
    """Return the types that a cache of `ops` may have on `device`, beside the model's own."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return ops.kv_cache_dtypes - {torch.float8_e4m3fn}
    return ops.kv_cache_dtypes


def version(device: torch.device, *, batch_invariant: bool = False) -> str:
    """Return a text that changes whenever the kernels for `device` may compute other bits.

    With a CPU's own kernels `batch_invariant` changes none.
    """
    if device.type == "cpu" and not interpreted(device):
        return str(extension.load())
    if device.type == "cuda" and not _has_gpu_kernels(device):
        return "reference"
    digest = hashlib.sha256()
    for source in sorted((Path(__file__).parent / "gpu").glob("*.py")):
        digest.update(source.read_bytes())
    mode = " batch-invariant" if batch_invariant else ""
    how = " interpreted" if interpreted(device) else ""
    return f"triton {package_version('triton')} {digest.hexdigest()[:16]}{mode}{how}"


def _has_gpu_kernels(device: torch.device) -> bool:
    # An AMD GPU is a "cuda" device too, with a capability such as (9, 4). No test has shown the kernels right on one.
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY

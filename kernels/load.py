"""Choice of a device's operations. A new device needs a folder like `kernels/reference`, and a case here."""

import hashlib
import logging
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


def ops(device: torch.device) -> Ops:
    """Return the operations for tensors on `device`. Raise ValueError if there are none for its type."""
    match device.type:
        case "cpu":
            if extension.load():
                return cpu_ops
            return reference_ops
        case "cuda":
            if _has_gpu_kernels(device):
                return gpu()
            logger.warning("%s has no kernels: plain torch operations serve", torch.cuda.get_device_name(device))
            return reference_ops
    raise ValueError(f"no kernels for device {device.type!r}")


def reference() -> Ops:
    """Return the reference operations, which run on any device."""
    return reference_ops


def gpu() -> Ops:
    """Return the operations of GPUs. Triton is imported here, since CPUs do without it."""
    from kernels.gpu import ops as gpu_ops

    return gpu_ops


def version(device: torch.device) -> str:
    """Return a text that changes whenever the kernels for `device` may compute other bits."""
    if device.type == "cpu":
        return str(extension.load())
    if not _has_gpu_kernels(device):
        return "reference"
    digest = hashlib.sha256()
    for source in sorted((Path(__file__).parent / "gpu").glob("*.py")):
        digest.update(source.read_bytes())
    return f"triton {package_version('triton')} {digest.hexdigest()[:16]}"


def _has_gpu_kernels(device: torch.device) -> bool:
    # An AMD GPU is a "cuda" device too, with a capability such as (9, 4). No test has shown the kernels right on one.
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY

"""Choice of a device's operations. A new device needs a folder like `kernels/reference`, and a case here."""

import torch

from kernels.cpu import extension
from kernels.cpu import ops as cpu_ops
from kernels.ops import Ops
from kernels.reference import ops as reference_ops


def ops(device: torch.device) -> Ops:
    """Return the operations for tensors on `device`. Raise ValueError if there are none for its type."""
    match device.type:
        case "cpu":
            if extension.load():
                return cpu_ops
            return reference_ops
        case "cuda":
            return reference_ops
    raise ValueError(f"no kernels for device {device.type!r}")


def reference() -> Ops:
    """Return the reference operations, which run on any device."""
    return reference_ops

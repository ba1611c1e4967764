"""The highest rates of this device, as measured, and the floors that follow from them."""

from typing import NamedTuple

import torch

from benchmarks.gpu_check.settings import Settings
from benchmarks.gpu_check.stopwatch import Stopwatch


class Ceilings(NamedTuple):
    """What the device reaches in torch's own copy and product."""

    bytes_per_second: float  # read and written
    flops_per_second: float

    def floor(self, bytes_moved: float, flops: float = 0) -> float:
        """Return the least seconds for so many bytes and operations, which overlap."""
        return max(bytes_moved / self.bytes_per_second, flops / self.flops_per_second)


def measure_ceilings(settings: Settings) -> Ceilings:
    """Measure a copy, and a product of square matrices of normal numbers in the model's type."""
    device, stopwatch = torch.device(settings.device), Stopwatch(torch.device(settings.device), settings.repeats)
    source = torch.zeros(settings.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = stopwatch.seconds(lambda: target.copy_(source))
    size = settings.product_size
    left, right = torch.randn(2, size, size, device=device).to(getattr(torch, settings.dtype))
    product = stopwatch.seconds(lambda: left @ right)
    return Ceilings(2 * settings.copied_bytes / copy, 2 * size**3 / product)


def gpu_ceilings(settings: Settings) -> Ceilings | None:
    """Return the ceilings of a GPU; None on a CPU, whose interpreted kernels have no floor worth a comparison."""
    return measure_ceilings(settings) if settings.is_gpu else None

"""Launching kernels: every launch of this package goes through `launch`, and three kinds of tensors may come.

    cuda    the kernel is compiled at its first use, unless the cache on disk has it, and launched
    cpu     the kernel is interpreted; TRITON_INTERPRET=1 must be set before anything imports triton
    meta    nothing runs; the kernel is compiled for the architecture that `compile_for` named, if it named one

Launches on meta tensors are recorded by `record`, so a forward pass on the meta device shows which kernels it needs.
What it compiles for is exactly what the same call would launch: Triton specialises on types, alignment and constants,
and a meta tensor has the alignment of its view's offset.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

INTERPRETED: bool = triton.knobs.runtime.interpret

Architecture = int | str
"""A compute capability of NVIDIA's, such as 90 (H100 and H200), or the name of an AMD architecture: gfx942 (MI300)."""


class Launch(NamedTuple):
    """A launch on meta tensors."""

    kernel: str  # the function's name
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    constexprs: dict[str, Any]
    compiled: Any  # triton's CompiledKernel; None where no architecture was named


class Configuration(NamedTuple):
    """Launches that `build.py` compiles and describes as one row of its table.

    Each kernel module has a function `configurations()` that yields those of its kernels, in all the types, head sizes
    and tiles that are served. Names are unique in a module.
    """

    name: str
    run: Callable[[], object]  # calls the operation, or `launch` itself, on tensors of the meta device
    shape: str = ""  # for which bytes and operations are counted
    bytes_moved: int = 0  # read and written at that shape; 0: not said
    flops: int = 0
    wgmma: bool = False  # whether sm_90's object must use Hopper's matrix instructions
    wide_loads: bool = False  # whether the object must have no loads of two bytes
    oldest: int = 80  # the first architecture on which it compiles: 89 where fp8 is used


_PROCESSORS = 132

_recorded: list[list[Launch]] = []
_architecture: Architecture | None = None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    enable_fp_fusion: bool = True,
    **constexprs: Any,
) -> None:
    """Launch `kernel` on `grid`; `args[0]` is a tensor, and all tensors are on its device.

    A grid with a zero launches nothing. Products are fused with sums unless `enable_fp_fusion` is off: it is always
    passed on, since triton's default depends on its version.
    """
    if 0 in grid:
        return
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
    if not args[0].is_meta:
        kernel[grid](*args, **options, **constexprs)
        return
    compiled = None
    if _architecture is not None:
        compiled = kernel.warmup(*args, grid=grid, **options, **constexprs)
    for launches in _recorded:
        launches.append(Launch(kernel.fn.__name__, grid, num_warps, num_stages, constexprs, compiled))


def processors(device: torch.device) -> int:
    """Return how many multiprocessors share the programs of a launch; those of an H200 where there is no GPU."""
    if device.type != "cuda":
        return _PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Return the list to which every launch on meta tensors is added inside the `with`."""
    launches: list[Launch] = []
    _recorded.append(launches)
    try:
        yield launches
    finally:
        _recorded.remove(launches)


class StubDriver:
    """A driver for Triton on a machine without a GPU: it names the architecture to compile for, and runs nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(architecture: Architecture) -> None:
    """Let launches on meta tensors compile for this architecture, for the whole process.

    The process can launch nothing on a GPU from then on. Raise RuntimeError if it has compiled for another one: Triton
    keeps objects by the device's number, and would silently return those of the first architecture.
    """
    global _architecture
    if INTERPRETED:
        raise RuntimeError("kernels are interpreted in this process, so they cannot be compiled")
    if _architecture is not None and _architecture != architecture:
        compiled, wanted = architecture_name(_architecture), architecture_name(architecture)
        raise RuntimeError(f"this process compiles for {compiled}; {wanted} needs another process")
    _architecture = architecture
    is_amd = isinstance(architecture, str)
    target = GPUTarget("hip", architecture, 64) if is_amd else GPUTarget("cuda", architecture, 32)
    triton.runtime.driver.set_active(StubDriver(target))


def architecture_name(architecture: Architecture) -> str:
    """Return the vendor's name, such as sm_90."""
    return architecture if isinstance(architecture, str) else f"sm_{architecture}"


def on_compile(report: Callable[[str], None] | None) -> None:
    """Call `report` with one line for each object that this process compiles or loads from now on; None: stop."""

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        types = ", ".join(f"{name}: {kind}" for name, kind in compile["signature"].items() if kind != "constexpr")
        names = list(compile["signature"])
        constants = ", ".join(f"{names[path[0]]}={value}" for path, value in compile["constants"].items())
        assert report is not None
        report(f"{fn.name}({types}; {constants}) with {compile['num_warps']} warps")

    triton.knobs.runtime.jit_post_compile_hook = None if report is None else hook

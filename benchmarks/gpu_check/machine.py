"""Part 1: the device, and what bounds everything else: its memory, its matrix products, and the cost of a launch."""

import platform
import subprocess
from functools import partial

import torch
import triton

from benchmarks.gpu_check.ceilings import measure_ceilings
from benchmarks.gpu_check.report import Report, Row, compare_times
from benchmarks.gpu_check.settings import Settings
from benchmarks.gpu_check.stopwatch import Call, Stopwatch
from kernels.load import gpu


def run(settings: Settings, report: Report) -> None:
    with report.check("device"):
        report.add(Row("device", _device_text(settings.device)))
    with report.check("driver"):
        report.add(Row("driver", _driver_text() if settings.is_gpu else "none"))
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    report.add(Row("versions", versions))
    with report.check("ceilings"):
        ceilings = measure_ceilings(settings)
        report.add(Row("copy, bytes read and written", f"{ceilings.bytes_per_second / 1e9:,.0f} GB/s"))
        name = f"{settings.dtype} product of {settings.product_size:,}³"
        report.add(Row(name, f"{ceilings.flops_per_second / 1e12:,.3g} TFLOP/s"))
    with report.check("cost of a launch"):
        _measure_launches(settings, report)


def _measure_launches(settings: Settings, report: Report) -> None:
    """Launch a kernel that has next to nothing to do: Triton's by the package's `launch`, and one of torch's."""
    device, count = torch.device(settings.device), settings.launches
    stopwatch, ops = Stopwatch(device, settings.repeats), gpu()
    x, weight = torch.ones(1, 128, device=device), torch.ones(128, device=device)
    ours, by_torch = (lambda: ops.rms_norm(x, weight, 1e-5)), (lambda: x + 1)

    eager = [stopwatch.seconds_of_launch(call, count) for call in (ours, by_torch)]
    report.add(compare_times("a launch, eager, beside torch's", *eager))

    in_graph = [stopwatch.seconds(partial(_repeatedly, call, count)) / count for call in (ours, by_torch)]
    report.add(compare_times("a launch, in a graph, beside torch's", *in_graph))


def _repeatedly(call: Call, count: int) -> None:
    for _ in range(count):
        call()


def _device_text(device: str) -> str:
    if device == "cpu":
        return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads; kernels interpreted"
    properties = torch.cuda.get_device_properties(device)
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    memory = properties.total_memory / 2**30
    return f"{properties.name}, {capability}, {properties.multi_processor_count} SMs, {memory:.1f} GiB"


def _driver_text() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    return f"{driver}, CUDA {torch.version.cuda}"

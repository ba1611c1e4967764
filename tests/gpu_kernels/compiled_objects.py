"""A process for test_gpu_build.py: compile kernels of known kinds for sm_90, and print what their objects say as JSON.

It is a process of its own because kernels are interpreted in that of the tests.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.elementwise import silu_and_mul
from kernels.gpu.launch import Launch, compile_for, launch, on_compile, record
from kernels.gpu.objects import describe

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@triton.jit
def matmul(a, b, c, stride, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, stride, K):
        left = tl.load(a + rows[:, None] * stride + start + inner[None, :])
        right = tl.load(b + columns[:, None] * stride + start + inner[None, :])
        total = tl.dot(left, right.T, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total)


def main() -> None:
    compilations: list[str] = []
    on_compile(compilations.append)
    compile_for(90)
    x, y = (torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
    found = {}
    kinds = {"mma": (16, 64, 4), "wgmma": (64, 64, 4), "spilled": (64, 128, 1)}
    for name, (rows, columns, warps) in kinds.items():
        with record() as launches:
            launch(matmul, (1,), x, y, y, 4096, num_warps=warps, M=rows, N=columns, K=64 if warps > 1 else 16)
        found[name] = facts(launches[0])
    for name, view in (("aligned", x), ("misaligned", x[:, 1:-1])):
        with record() as launches:
            silu_and_mul(view)
            silu_and_mul(view[:7])
        found[name] = facts(launches[0]) | {"same": launches[0].compiled is launches[1].compiled}
    try:
        compile_for(80)
    except RuntimeError as error:
        found["another"] = {"error": str(error)}
    print(json.dumps({"objects": found, "compilations": compilations}))


def facts(launched: Launch) -> dict[str, Any]:
    """Return what we read, and what NVIDIA's tools say where Triton has brought them."""
    result = describe(launched.compiled)._asdict() | {"tools": None}
    if (TOOLS / "cuobjdump").exists() and (TOOLS / "nvdisasm").exists():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(launched.compiled.asm["cubin"])
            file.flush()
            usage = run(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
            code = run(TOOLS / "nvdisasm", "-c", file.name)
        numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert numbers
        result["tools"] = {
            "registers": int(numbers[1]),
            "stack": int(numbers[2]),
            "two_byte_loads": len(re.findall(r"\bLDG[\w.]*\.U16", code)),
            "copies": len(re.findall(r"\bLDGSTS", code)),
        }
    return result


def run(*argv: str | Path) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()

"""A process for test_gpu_build.py: print the keys of the objects that some launches need, and compile nothing.

The argument is the device of the launches' tensors. On `meta` it launches as the build does. On `cpu` it launches as a
worker does, on tensors that have addresses; it stops where Triton looks for the object, before anything would run.
"""

import hashlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.nvidia.driver import CudaDriver
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key

import kernels
from kernels.batch_rows import BatchRows
from kernels.gpu.attention import paged_attention, plan_attention
from kernels.gpu.cache import copy_blocks
from kernels.gpu.elementwise import add_rms_norm, silu_and_mul
from kernels.gpu.launch import StubDriver, compile_for
from kernels.layout import KVLayout


def main(device: torch.device) -> None:
    if device.type == "meta":
        compile_for(90)
    else:
        gpu: Any = SimpleNamespace(get_current_device=lambda: 0, get_device_capability=lambda device: (9, 0))
        triton.runtime.driver.set_active(StubDriver(CudaDriver.get_current_target(gpu)))
    keys: list[str] = []

    def look_up(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        target = triton.runtime.driver.active.get_current_target()
        backend = make_backend(target)
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        options = backend.parse_options(json.loads(compile["specialization_data"])["options"])
        key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
        keys.append(hashlib.sha256(key.encode()).hexdigest())
        return True  # the object is not needed

    triton.knobs.runtime.jit_cache_hook = look_up
    launch_all(device)
    print(json.dumps({"sources": kernels.__path__[0], "keys": keys}))


def launch_all(device: torch.device) -> None:
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device=device)
    weight = torch.empty(4096, dtype=torch.bfloat16, device=device)
    add_rms_norm(x, x, weight, 1e-5)
    silu_and_mul(x)
    silu_and_mul(x[:, 1:-1])  # not aligned to 16 bytes
    layout = KVLayout(2, 8, 128, 16, torch.bfloat16)
    cache = layout.allocate(64, device)
    pairs = torch.zeros(2, 3, dtype=torch.int64, device=device)
    copy_blocks(cache, pairs[0], pairs[1])
    keys, values = layout.views(cache)[1]
    q = torch.empty(20, 32, 128, dtype=torch.bfloat16, device=device)
    tables = torch.zeros(4, 40, dtype=torch.int32, device=device)
    rows = BatchRows.of(torch.tensor([0, 1, 2, 3, 20]), torch.tensor([300, 20, 1, 0])).to(device)
    plan = plan_attention(rows, tables, block_size=16, num_kv_heads=8)
    paged_attention(q, keys, values, plan, scale=128**-0.5)


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))

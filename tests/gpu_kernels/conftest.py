"""Where the GPU's kernels run: interpreted on CPU tensors, or under `-m gpu` compiled on a CUDA device.

These tests need a pytest process of their own, because Triton decides between the two as it is imported.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Set TRITON_INTERPRET before a test module imports the kernels."""
    compiled = config.getoption("markexpr") == "gpu"
    if os.environ.get("TRITON_INTERPRET") == ("0" if compiled else "1"):
        return
    if "triton" in sys.modules:
        raise pytest.UsageError("triton is imported already: run tests/gpu_kernels in a process of its own")
    os.environ["TRITON_INTERPRET"] = "0" if compiled else "1"
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # poisoned memory takes deterministic algorithms, see below


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that run on a device."""
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of the tensors that kernels are tested on."""
    if os.environ["TRITON_INTERPRET"] == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda")


@pytest.fixture(scope="session", autouse=True)
def _interpreted_products_are_invariant() -> Iterator[None]:
    """Let the interpreter sum products in float64, whose last bits rounding to float32 drops.

    It multiplies by numpy, whose library sums a row in an order that depends on the row's place in a tile, at least on
    processors with AVX2 alone. A GPU's instructions do not.
    """
    if os.environ["TRITON_INTERPRET"] != "1":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def create_exact_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if d.data.dtype != np.float32 or {a.data.dtype, b.data.dtype} - {np.dtype("f2"), np.dtype("f4")}:
            return create_dot(self, a, b, d, *rest)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)

    with patch.object(InterpreterBuilder, "create_dot", create_exact_dot):
        yield


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_poisoned() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that a result that no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)

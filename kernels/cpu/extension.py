"""The compiled kernels of a CPU: the library for this processor, its path, and loading it.

`build.py` compiles the sources in `csrc` ahead of time, once for each instruction set. A library's name holds a digest
of its sources, so a library that is out of date is never loaded. Its operations are registered as `torch.ops.quire`.
"""

import hashlib
import logging
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
LIBRARIES = Path(__file__).parent / "lib"
DIGEST = 12  # characters of the digest in a library's name

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", *_AVX2)

REQUIRED_FEATURES = {  # of each instruction set, by their names in /proc/cpuinfo, the best set first
    "avx512_bf16": {"avx512_bf16", *_AVX512},
    "avx512": {*_AVX512},
    "avx2": {*_AVX2},
}
FLAGS = {  # the compiler's flags for each
    name: tuple(f"-m{feature.replace('_', '')}" for feature in sorted(features))
    for name, features in REQUIRED_FEATURES.items()
}


@cache
def load() -> str | None:
    """Load the library for this processor, once. Return the name of its instruction set.

    Return None, and log a warning, if the processor has no supported one, or the library was not built.
    """
    best = instruction_set()
    if best is None:
        logger.warning(
            "this processor has neither AVX-512 (with VNNI) nor AVX2: the plain kernels serve, which are slower"
        )
        return None
    path = library(best)
    if not path.exists():
        logger.warning(
            "the kernels for %s are not built (python -m kernels.cpu.build): the plain ones serve, slower", best
        )
        return None
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    return best


def instruction_set() -> str | None:
    """Return the best supported instruction set that this processor has, or None."""
    flags = _processor_flags()
    return next((name for name, features in REQUIRED_FEATURES.items() if features <= flags), None)


def library(name: str) -> Path:
    """Return the path at which the library for an instruction set is, if it is built."""
    digest = hashlib.sha256(f"{torch.__version__} {' '.join(FLAGS[name])}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return LIBRARIES / f"quire_{name}_{digest.hexdigest()[:DIGEST]}.so"


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())

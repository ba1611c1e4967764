"""The compiled kernels of a CPU: the library for this processor, its path, and loading it.

`build.py` compiles the sources in `csrc` ahead of time, once for each instruction set. A library's name holds a digest
of its sources, so a library that is out of date is never loaded. Its operations are registered as `torch.ops.quire`.
"""

import ctypes
import hashlib
import logging
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
LIBRARIES = Path(__file__).parent / "lib"
CPUINFO = Path("/proc/cpuinfo")
DIGEST = 12  # characters of the digest in a library's name

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", *_AVX2)
_AMX = ("amx_tile", "amx_int8")

REQUIRED_FEATURES = {  # of each instruction set, by their names in /proc/cpuinfo, the best set first
    "amx": {*_AMX, "avx512_bf16", *_AVX512},
    "avx512_bf16": {"avx512_bf16", *_AVX512},
    "avx512": {*_AVX512},
    "avx_vnni": {"avx_vnni", *_AVX2},
    "avx2": {*_AVX2},
}
FLAGS = {  # the compiler's flags for each
    name: tuple(f"-m{feature.replace('_', '-' if feature in _AMX else '')}" for feature in sorted(features))
    for name, features in REQUIRED_FEATURES.items()
}

# System call 158 of x86-64 is arch_prctl. A process asks with it, once, for the memory of AMX's tiles.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


_chosen: str | None = None  # by `choose`


def choose(name: str) -> None:
    """Have `load` take the library for one instruction set, or with "none" no library, instead of the best.

    Raise ValueError if this processor lacks the instruction set, its library is not built, or another one is loaded:
    a process can load only one.
    """
    global _chosen
    if name != "none":
        if not REQUIRED_FEATURES[name] <= _processor_flags():
            raise ValueError(f"{name}: this processor lacks it, or Linux does not let this process use it")
        if not library(name).exists():
            raise ValueError(f"{name}: its kernels are not built (python -m kernels.cpu.build {name})")
    if load.cache_info().currsize and (load() or "none") != name:
        raise ValueError(f"{name}: this process has loaded other kernels ({load()})")
    _chosen = name


@cache
def load() -> str | None:
    """Load the library for this processor, once. Return the name of its instruction set.

    Return None, and log a warning, if the processor has no supported one, or the library was not built. Return None if
    `choose` has chosen to load none.
    """
    if _chosen == "none":
        return None
    best = _chosen or instruction_set()
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


@cache
def _processor_flags() -> frozenset[str]:
    """Return the features that this processor has and that Linux lets this process use, by Linux's names."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset[str]())
    if flags.issuperset(_AMX) and not _request_tiles():
        logger.warning("this processor has AMX, but Linux does not let this process use it")
        return flags.difference(_AMX)
    return flags


def _request_tiles() -> bool:
    """Ask Linux to let all threads of this process use AMX's tiles, and return whether they may."""
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)) == 0

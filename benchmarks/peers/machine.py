"""Says what this machine computes with, in words that tell it from others of the same processor's name."""

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AVX512 = {"avx512_vnni": "VNNI", "avx512_bf16": "BF16"}  # what it may have besides; features by Linux's names
AMX = {"amx_int8": "INT8", "amx_bf16": "BF16"}


def describe_machine() -> str:
    """Return the number of cores that this process may use, the processor's name and its instructions for vectors."""
    lines = CPUINFO.read_text().splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name, cores = fields.get("model name", platform.machine()), len(os.sched_getaffinity(0))
    return f"{cores} cores of {name}, {describe_instructions(frozenset(fields.get('flags', '').split()))}"


def describe_instructions(features: frozenset[str]) -> str:
    """Return which instructions for vectors and matrices a processor with these features has."""
    if "avx512f" not in features:
        if "avx2" not in features:
            return "without AVX2"
        return "AVX2 with VNNI, without AVX-512" if "avx_vnni" in features else "AVX2 without AVX-512"
    amx = [title for feature, title in AMX.items() if feature in features]
    avx512 = _with("AVX-512", [title for feature, title in AVX512.items() if feature in features])
    return f"{avx512}, {_with('AMX', amx)}" if amx else f"{avx512}, without AMX"


def _with(name: str, parts: list[str]) -> str:
    return f"{name} with {' and '.join(parts)}" if parts else name

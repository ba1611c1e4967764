"""Reading compiled objects: what a kernel needs of a GPU, told without one and without NVIDIA's tools.

Registers and stack stand in the object itself, an ELF file; shared memory in Triton's metadata; and kinds of
instructions in the PTX, whose loads, copies and matrix products ptxas takes over one by one.
"""

import re
import struct
from typing import Any, NamedTuple

from kernels.gpu.launch import Architecture

SHARED_OF_BLOCK: dict[Architecture, int] = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, "gfx942": 64}
"""KiB of shared memory that a block may have, by architecture: those that kernels can be compiled for."""

SHARED_OF_SM = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100}
WARPS_OF_SM = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 103: 64, 120: 48}
_REGISTERS_OF_SM = 65536
_SHARED_OF_SYSTEM = 1024  # bytes a block

_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTERS = 0x11, 0x12, 0x2F  # attributes in .nv.info
_SIZED = 0x04  # the format of attributes with a payload

_MATRIX = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma\b", "mma": r"\bmma\.sync"}
_COPY = r"cp\.async\.c[ag]\."
_TMA = r"cp\.async\.bulk\.tensor"
_TWO_BYTE_LOAD = r"ld\.global(?:\.(?!v[248]\b)[\w:]+)*\.[bu]16\b"


class ObjectInfo(NamedTuple):
    """What an object is made of."""

    registers: int  # of a thread
    stack: int  # bytes of a thread; more than 0: registers were spilled
    shared: int  # bytes of a block
    blocks: int  # blocks that fit on an SM
    matrix: str  # the kind of its matrix instructions and their number, such as "wgmma 16"; empty if none
    copies: int  # cp.async instructions
    tma: int  # loads and stores of whole tiles by the tensor memory accelerator
    two_byte_loads: int


def describe(compiled: Any) -> ObjectInfo:
    """Return what is read from triton's CompiledKernel for a CUDA architecture."""
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    registers, stack = registers_and_stack(compiled.asm["cubin"])
    counts = {kind: len(re.findall(pattern, ptx)) for kind, pattern in _MATRIX.items()}
    return ObjectInfo(
        registers=registers,
        stack=stack,
        shared=metadata.shared,
        blocks=blocks_on_sm(metadata.target.arch, registers, metadata.shared, metadata.num_warps),
        matrix=", ".join(f"{kind} {count}" for kind, count in counts.items() if count),
        copies=len(re.findall(_COPY, ptx)),
        tma=len(re.findall(_TMA, ptx)),
        two_byte_loads=len(re.findall(_TWO_BYTE_LOAD, ptx)),
    )


def blocks_on_sm(architecture: int, registers: int, shared: int, num_warps: int) -> int:
    """Return how many blocks an SM holds at once: its registers, shared memory and warps bound them."""
    of_warp = -(-registers * 32 // 256) * 256  # registers are given to warps in pieces of 256
    by_registers = _REGISTERS_OF_SM // (of_warp * num_warps)
    by_shared = SHARED_OF_SM[architecture] * 1024 // (shared + _SHARED_OF_SYSTEM)
    return min(by_registers, by_shared, WARPS_OF_SM[architecture] // num_warps, 32)


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread, the largest of the functions in an object."""
    registers = stack = 0
    for attribute, payload in _attributes(_section(cubin, ".nv.info")):
        if attribute == _REGISTERS:
            registers = max(registers, struct.unpack("<II", payload)[1])
        elif attribute in (_FRAME_SIZE, _MIN_STACK_SIZE):
            stack = max(stack, struct.unpack("<II", payload)[1])
    return registers, stack


def _section(elf: bytes, name: str) -> bytes:
    """Return a section of a 64-bit ELF file. Raise ValueError if it is none, or has no such section."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    start, size, count, names_index = struct.unpack_from("<Q10xHHH", elf, 40)
    headers = [struct.unpack_from("<I20xQQ", elf, start + size * index) for index in range(count)]
    names = headers[names_index]
    for name_offset, offset, length in headers:
        first = names[1] + name_offset
        if elf[first : elf.index(b"\0", first)].decode() == name:
            return elf[offset : offset + length]
    raise ValueError(f"the object has no section {name}")


def _attributes(info: bytes) -> list[tuple[int, bytes]]:
    """Return (attribute, payload) of those that have a payload: a format, an attribute, a length of two bytes."""
    attributes, position = [], 0
    while position < len(info):
        kind, attribute, length = struct.unpack_from("<BBH", info, position)
        position += 4
        if kind == _SIZED:
            attributes.append((attribute, info[position : position + length]))
            position += length
    return attributes

"""Reads a GGUF file's header: the metadata, and the type, shape and offset of each tensor.

The `gguf` package's own reader takes seconds for a usual vocabulary, since it makes arrays of each string. This module
parses the bytes itself, with the package's tables of types. Every bound is checked against the file's size: a file that
is cut short or damaged is a `ModelError` naming the file and what could not be read.
"""

import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGUF_VERSION,
    GGMLQuantizationType,
    GGUFValueType,
    Keys,
)
from msgspec import Struct

from shared.errors import ModelError
from shared.gguf.parts import find_parts

V = TypeVar("V")

VERSIONS = (2, GGUF_VERSION)
MAX_COUNT = 2**24  # tensors or keys; a larger count means damage
MAX_NAME_LENGTH = 1024  # characters

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


class StoredTensor(Struct, frozen=True):
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]  # rows first, as in numpy; quantised along the last dimension
    type: GGMLQuantizationType
    path: Path
    offset: int  # of its first byte, from the start of the file

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return int(math.prod(self.shape) // block * size)

    def __str__(self) -> str:
        return f"{self.path}: tensor {self.name} ({self.type.name} {list(self.shape)})"


class Header(Struct, frozen=True):
    """The header of one model, whose tensors may be in several files."""

    paths: tuple[Path, ...]  # the first has the metadata
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Return the header of a model, from all its parts if it is split. Raise `ModelError` if it cannot be read."""
    paths = find_parts(path)
    parts = [_read(part) for part in paths]
    metadata = parts[0].metadata
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelError(f"{tensor}: {tensors[name].path} has a tensor of that name too")
            tensors[name] = tensor
    if (count := metadata.get(Keys.Split.LLM_KV_SPLIT_COUNT, 0) or 1) != len(paths):
        raise ModelError(
            f"{paths[0]}: it is one of {count} files, which must keep their names (...-00001-of-00002.gguf)"
        )
    for number, part in enumerate(parts):
        if part.metadata.get(Keys.Split.LLM_KV_SPLIT_NO, 0) != number:
            raise ModelError(f"{paths[number]}: its name says part {number + 1}, its header says another")
    if (total := metadata.get(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, len(tensors))) != len(tensors):
        raise ModelError(f"{paths[0]}: the files of this model have {len(tensors)} tensors, and should have {total}")
    return Header(paths, metadata, tensors)


def _read(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
                raise ModelError(f"{path} is not a GGUF file: it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).header()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


class _TensorInfo(NamedTuple):
    """A tensor as the header describes it."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int  # from the end of the header


class _HeaderReader:
    """Reads the bytes of one file from the position `at` on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 0, len(data)
        self.reading = "its first bytes"

    def header(self) -> Header:
        if self.take(4) != struct.pack("<I", GGUF_MAGIC):
            raise ModelError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'")
        version = self.number("<u4")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "is a big-endian file" if swapped in VERSIONS else f"has version {version} of the format"
            raise ModelError(f"{self.path} {what} (supported: little-endian, versions {VERSIONS[0]} to {VERSIONS[-1]})")
        tensors, keys = self.count("tensors"), self.count("keys")
        metadata = self.distinct("key", (self.key() for _ in range(keys)))
        infos = self.distinct("tensor", ((info.name, info) for info in (self.tensor() for _ in range(tensors))))
        alignment = metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: {Keys.General.ALIGNMENT} is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        return Header((self.path,), metadata, {name: self.stored(info, start) for name, info in infos.items()})

    def distinct(self, what: str, named: Iterable[tuple[str, V]]) -> dict[str, V]:
        """Return a dict of the pairs. Raise `ModelError` if a name comes twice."""
        values: dict[str, V] = {}
        for name, value in named:
            if name in values:
                raise ModelError(f"{self.path}: there are two {what}s called {name}")
            values[name] = value
        return values

    def key(self) -> tuple[str, Any]:
        name = self.name("key")
        self.reading = f"key {name}"
        return name, self.value(self.value_type())

    def value(self, type: GGUFValueType) -> Any:
        if type == GGUFValueType.STRING:
            return self.string()
        if type != GGUFValueType.ARRAY:
            value = np.frombuffer(self.take(np.dtype(_SCALARS[type]).itemsize), _SCALARS[type])[0]
            # the shortest decimal that rounds to this float32: the number in the original config.json
            return float(str(value)) if type == GGUFValueType.FLOAT32 else value.item()
        type, length = self.value_type(), self.number("<u8")
        if type == GGUFValueType.ARRAY:  # no known key has one
            raise ModelError(f"{self.path}: {self.reading} is an array of arrays, which is not supported")
        if type == GGUFValueType.STRING:
            if length * 8 > self.size - self.at:
                raise self.cut_short()
            return self.strings(length)
        return np.frombuffer(self.take(length * np.dtype(_SCALARS[type]).itemsize), _SCALARS[type]).tolist()

    def value_type(self) -> GGUFValueType:
        number = self.number("<u4")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise ModelError(f"{self.path}: {self.reading} has a value of unknown type {number}") from error

    def strings(self, count: int) -> list[str]:
        """Read `count` strings. The loop is written for speed: a vocabulary has hundreds of thousands."""
        data, at, strings = self.data, self.at, []
        length = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                (size,) = length(data, at)
                end = at + 8 + size
                if end > self.size:
                    raise self.cut_short()
                strings.append(data[at + 8 : end].decode("utf-8", "replace"))
                at = end
        except struct.error as error:
            raise self.cut_short() from error
        self.at = at
        return strings

    def string(self) -> str:
        return self.strings(1)[0]

    def name(self, what: str) -> str:
        """Read a name, and check that it is printable: a damaged length would read weights as a name."""
        name = self.string()
        if len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise ModelError(f"{self.path} is damaged: behind {self.reading} there is a {what} called {name[:32]!r}...")
        return name

    def tensor(self) -> _TensorInfo:
        name = self.name("tensor")
        self.reading = f"tensor {name}"
        dimensions = self.number("<u4")
        if dimensions > 8:
            raise ModelError(f"{self.path}: tensor {name} has {dimensions} dimensions")
        shape = tuple(self.number("<u8") for _ in range(dimensions))[::-1]
        return _TensorInfo(name, shape, self.number("<u4"), self.number("<u8"))

    def stored(self, info: _TensorInfo, start: int) -> StoredTensor:
        name, shape, number, offset = info
        try:
            tensor = StoredTensor(name, shape, GGMLQuantizationType(number), self.path, start + offset)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name} has the unknown quantisation type {number}") from error
        block, _ = GGML_QUANT_SIZES[tensor.type]
        if (shape[-1] if shape else 1) % block:
            raise ModelError(f"{tensor}: its rows are not whole blocks of {block}")
        if (end := tensor.offset + tensor.nbytes) > self.size:
            raise ModelError(f"{tensor} ends at byte {end}, but the file has {self.size}: it is cut short")
        return tensor

    def count(self, what: str) -> int:
        number = self.number("<u8")
        if number > MAX_COUNT:
            raise ModelError(f"{self.path} is damaged: it says to have {number} {what}")
        return number

    def number(self, dtype: str) -> int:
        return int(np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0])

    def take(self, count: int) -> bytes:
        if self.at + count > self.size:
            raise self.cut_short()
        self.at += count
        return self.data[self.at - count : self.at]

    def cut_short(self) -> ModelError:
        return ModelError(f"{self.path} is cut short: it ends within {self.reading}, at byte {self.size}")

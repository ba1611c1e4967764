"""Copies between host and device: one to the device a step (`StepBuffer`), and one back (`HostCopy`).

On a GPU neither waits: memory on the host is pinned, and torch reuses it only when the copy that reads it has passed.
On a CPU, the device's memory is the host's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels read such addresses with the widest loads

Array = npt.NDArray[Any]


class StepBuffer:
    """Collects the arrays that a step needs on the device, and copies them there at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sections: list[Section] = []
        self._size = 0
        self.bytes = torch.empty(0, dtype=torch.uint8)  # on the device, after `send`

    def add(self, array: Array) -> "Section":
        """Return where `array` will lie on the device, contiguous; its items have 4 or 8 bytes."""
        section = Section(self, np.ascontiguousarray(array), self._size)
        self._sections.append(section)
        self._size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return section

    def send(self) -> None:
        """Copy all arrays to the device. None can be added afterwards."""
        on_host = torch.empty(self._size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        memory = on_host.numpy()
        for section in self._sections:
            memory[section.start : section.start + section.array.nbytes] = section.array.reshape(-1).view(np.uint8)
        self.bytes = on_host.to(self.device, non_blocking=True)

    @property
    def words(self) -> Tensor:
        """All that was sent, as int32."""
        return self.bytes.view(torch.int32)


class Section:
    """An array of a `StepBuffer`."""

    def __init__(self, buffer: StepBuffer, array: Array, start: int) -> None:
        self._buffer, self.array, self.start = buffer, array, start

    @property
    def word(self) -> int:
        """The index of its first number in `StepBuffer.words`."""
        return self.start // 4

    @property
    def tensor(self) -> Tensor:
        """The array on the device, after `send`."""
        if self._buffer.device.type == "cpu":
            return torch.from_numpy(self.array)
        part = self._buffer.bytes[self.start : self.start + self.array.nbytes]
        return part.view(_DTYPES[self.array.dtype.str]).view(self.array.shape)


_DTYPES = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32}


class HostCopy:
    """Tensors that come to the host in one copy, as soon as the device has computed them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy `tensors`, all on one device; their items have 4 or 8 bytes."""
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            words = [tensor.contiguous().view(-1).view(torch.int32) for tensor in tensors]
            self._on_host = torch.empty(sum(map(len, words)), dtype=torch.int32, pin_memory=True)
            self._on_host.copy_(words[0] if len(words) == 1 else torch.cat(words), non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # one that spins would keep a core from other work
            self._event.record()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host."""
        if self._event is None:
            return list(self._tensors)
        self._event.synchronize()
        sizes = [tensor.numel() * tensor.itemsize // 4 for tensor in self._tensors]
        parts = torch.split(self._on_host, sizes)
        return [  # each copied, since a view of items of 8 bytes must begin at a multiple of 8
            part.clone().view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, self._tensors, strict=True)
        ]

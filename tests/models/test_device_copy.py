"""Copies to a GPU through pinned buffers: here by a stream that runs its work only when someone waits for it."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.models import parameters
from services.worker.models.device_copy import PinnedRing, copy_to
from services.worker.models.load import match_family
from services.worker.models.parameters import load_weights
from services.worker.models.precision import Precision
from services.worker.models.registry import read_supported
from services.worker.models.spec import parameter_shapes
from tests.models.family_variants import VARIANTS
from tests.models.tiny_models import save

CPU = torch.device("cpu")


class LazyStream:
    """A stream that runs its work as late as it may."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], object]] = []
        self.launched = self.ran = self.longest = 0
        self.waits: list[int] = []  # the events that were waited for, by number

    @contextmanager
    def between(self) -> Iterator[None]:
        yield
        self.run_until(self.launched)

    def launch(self, work: Callable[[], object]) -> "LazyEvent":
        self.pending.append(work)
        self.launched += 1
        self.longest = max(self.longest, len(self.pending))
        return LazyEvent(self, self.launched)

    def run_until(self, number: int) -> None:
        while self.ran < number:
            self.pending.pop(0)()
            self.ran += 1


class LazyEvent:
    def __init__(self, stream: LazyStream, number: int) -> None:
        self._stream, self._number = stream, number

    def synchronize(self) -> None:
        self._stream.waits.append(self._number)
        self._stream.run_until(self._number)


def ring(size: int = 80, count: int = 2) -> tuple[PinnedRing, LazyStream]:
    stream = LazyStream()
    return PinnedRing([torch.empty(size, dtype=torch.uint8) for _ in range(count)], stream), stream


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


SOURCES = {
    "a scalar": numbers(),
    "a vector": numbers(13),
    "a long vector": numbers(321),
    "a matrix": numbers(7, 9),
    "rows as long as a buffer": numbers(5, 20),
    "rows longer than a buffer": numbers(3, 47),
    "experts": numbers(3, 7, 9),
    "a transposed matrix": numbers(31, 9).T,
    "a transposed matrix of long columns": numbers(3, 47).T,
    "every other column": numbers(9, 30)[:, ::2],
    "no rows": numbers(0, 9),
    "no columns": numbers(9, 0),
}


@pytest.mark.parametrize("types", ["float32 float32", "float32 bfloat16", "float16 float32", "bfloat16 float16"])
@pytest.mark.parametrize("kind", SOURCES)
def test_targets_get_their_sources(kind: str, types: str) -> None:
    stored, target_type = (getattr(torch, name) for name in types.split())
    source = SOURCES[kind].to(stored)  # keeps strides
    copier, stream = ring()
    memory = torch.full((3, *source.shape), 7.0, dtype=target_type)
    copier.copy([(memory[1], source)])
    assert torch.equal(memory[1], source.to(target_type))
    assert (memory[[0, 2]] == 7).all()
    assert not stream.pending


def test_transposed_targets() -> None:
    copier, _ = ring()
    target, source = torch.zeros(9, 31), numbers(31, 9)
    copier.copy([(target.T, source)])
    assert torch.equal(target, source.T)


def test_a_buffer_waits_for_its_own_copy_alone() -> None:
    """Ten pieces of three buffers: the fourth waits for the first, and so on. One tensor follows another at once."""
    copier, stream = ring(count=3)
    sources = [numbers(5, 20), numbers(3, 20), numbers(30)]  # 5, 3 and 2 pieces of 20 floats at most
    targets = [torch.zeros_like(source) for source in sources]
    copier.copy(zip(targets, sources, strict=True))
    assert stream.launched == 10
    assert stream.waits == [1, 2, 3, 4, 5, 6, 7]
    assert stream.longest == 3
    copier.copy([(targets[2], sources[0].view(-1)[:30])])
    assert stream.waits == [*range(1, 10)]
    assert torch.equal(targets[2], sources[0].view(-1)[:30])
    assert all(map(torch.equal, targets[:2], sources[:2]))


def test_threads_share_the_buffers() -> None:
    """transformers loads in threads that are not in inference mode, while the buffers were allocated in it.

    Bytes, such as the masks that old checkpoints hold, are the case in which torch minds.
    """
    with torch.inference_mode():
        copier, _ = ring()
    sources = [(numbers(23, 9) + index).to((torch.float32, torch.uint8)[index % 2]) for index in range(40)]

    def load(source: Tensor) -> Tensor:
        target = torch.zeros_like(source)
        copier.copy([(target, source)])
        return target

    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(load, sources), sources))


def test_a_cpu_has_no_ring() -> None:
    target, source = torch.zeros(3, 2, dtype=torch.bfloat16), numbers(2, 3).T
    copy_to(CPU)([(target, source)])
    assert torch.equal(target, source.bfloat16())
    assert not isinstance(getattr(copy_to(CPU), "__self__", None), PinnedRing)


@pytest.mark.parametrize("variant", ["llama", "phi3", "gpt2", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("types", ["float32 float32", "float32 bfloat16", "float16 bfloat16"])
def test_parameters_through_the_ring(variant: str, types: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several tensors, of one expert's part of a tensor, and transposed ones."""
    stored, dtype = (getattr(torch, name) for name in types.split())
    save(VARIANTS[variant]().to(stored), tmp_path)
    direct = load_all(tmp_path, dtype)
    copier, stream = ring(1000)
    monkeypatch.setattr(parameters, "copy_to", lambda device: copier.copy)
    through_ring = load_all(tmp_path, dtype)
    assert stream.launched > len(direct) > 10
    assert all(tensor.dtype == dtype for tensor in through_ring.values())
    assert direct.keys() == through_ring.keys()
    assert [name for name in direct if not torch.equal(direct[name], through_ring[name])] == []


def load_all(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters of the model in `path`, by name."""
    folder, implementation = read_supported(path, "auto")
    files = WeightFiles(folder)
    _, match = match_family(folder.config, implementation, "auto", files)
    assert match
    assert match.tensors
    with load_weights(files, match.tensors, Precision(dtype, None, dtype), CPU) as weights:
        return {name: weights.load(name) for name in dict(parameter_shapes(match.spec)) if name in weights}

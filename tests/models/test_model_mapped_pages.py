"""Tests that loading reads files ahead, keeps none of their pages, and copies no matrix before it is packed."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels.quantized import FloatWeight, RoundedWeight
from services.worker.checkpoint.mapped_pages import release, will_need
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.models import parameters
from services.worker.models.load import match_family
from services.worker.models.parameters import MappedPages, load_weights
from services.worker.models.precision import Precision
from services.worker.models.registry import read_supported
from services.worker.models.share import Share
from services.worker.models.tensor_map import TensorMap
from services.worker.parallel_config import ONE_RANK, ParallelConfig
from tests.models.gptq_awq_writer import Scheme, save_packed
from tests.models.tiny_models import llama, save
from tests.waiting import wait_until

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def open_model(path: Path) -> tuple[WeightFiles, TensorMap]:
    folder, implementation = read_supported(path, "auto")
    files = WeightFiles(folder)
    _, match = match_family(folder.config, implementation, "auto", files)
    assert match
    assert match.tensors
    return files, match.tensors


def resident(path: Path) -> int:
    """Return the bytes of a mapped file that are in this process's memory."""
    size, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and ":" not in line.split()[0]:
            counts = line.endswith(str(path))
        elif counts and line.startswith("Rss:"):
            size += int(line.split()[1]) * 1024
    return size


def test_released_pages_are_no_longer_in_memory_and_are_read_again(tmp_path: Path) -> None:
    files = WeightFiles(ModelFolder.read(save(llama(vocab_size=8000), tmp_path)))
    weights = tmp_path / "model.safetensors"
    (embedding,) = files.mapped("model.embed_tokens.weight")
    before = embedding.clone()
    held = resident(weights)
    assert held >= embedding.nbytes
    release(embedding)
    assert resident(weights) <= held - embedding.nbytes + 2 * os.sysconf("SC_PAGE_SIZE")
    assert torch.equal(embedding, before)


def test_what_lies_beside_released_pages_stays() -> None:
    """Memory that is not a file's loses its bytes, so this shows how far `release` reaches."""
    ones = torch.ones(40_000, dtype=torch.uint8)
    release(ones[1:5])
    assert ones.all()
    release(ones[3:39_990])
    assert ones[:4].all()
    assert ones[39_989:].all()
    assert not ones.all()


@pytest.mark.parametrize("stored", ["safetensors", "bin", "old bin", "gptq"])
def test_the_mapped_bytes_of_a_tensor(stored: str, tmp_path: Path) -> None:
    """None where the file is not mapped: releasing such memory would lose weights."""
    if stored == "gptq":
        files = WeightFiles(ModelFolder.read(save_packed(llama(**WIDE), tmp_path, Scheme())))
    else:
        save(llama(**WIDE), tmp_path)
        if "bin" in stored:
            tensors = load_file(tmp_path / "model.safetensors")
            torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=stored == "bin")
            (tmp_path / "model.safetensors").unlink()
        files = WeightFiles(ModelFolder.read(tmp_path))
    name = "model.layers.0.self_attn.q_proj.weight"
    mapped = files.mapped(name)
    sizes = {"old bin": [], "gptq": [64 * 32, 2 * 32, 2 * 64 * 2]}  # quants, zero points, scales
    assert [tensor.nbytes for tensor in mapped] == sizes.get(stored, [64 * 64 * 4])


@pytest.mark.parametrize("packed", [False, True])
def test_progress_is_counted_in_bytes_of_the_files(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the type that is computed in, they would be half as many for these floats, and four times for these quants."""
    path = save_packed(llama(**WIDE), tmp_path, Scheme()) if packed else save(llama(**WIDE), tmp_path)
    files, tensors = open_model(path)
    totals: list[int] = []
    done: list[int] = []

    @contextmanager
    def counting(_: str, total: int) -> Iterator[Callable[[int], object]]:
        totals.append(total)
        yield done.append

    monkeypatch.setattr(parameters, "progress", counting)
    precision = Precision(torch.bfloat16, "gptq" if packed else None, torch.bfloat16)
    with load_weights(files, tensors, precision, CPU) as weights:
        for name, source in tensors.sources.items():
            (weights.load_matrix if len(source.tensors[0].shape) == 2 else weights.load)(name)
    stored = load_file(path / "model.safetensors")
    assert totals == [sum(tensor.nbytes for name, tensor in stored.items() if not name.endswith(".g_idx"))]
    assert sum(done) == totals[0]


def test_pages_are_read_ahead_and_released_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, tensors = open_model(save(llama(**WIDE), tmp_path))
    events: list[tuple[str, int]] = []

    def record(event: str) -> Callable[[Tensor], None]:
        return lambda mapped: events.append((event, mapped.data_ptr()))

    monkeypatch.setattr(parameters, "will_need", record("ahead"))
    monkeypatch.setattr(parameters, "release", record("release"))
    monkeypatch.setattr(parameters, "_READ_AHEAD", 100_000)
    share = Share(tensors.spec, ONE_RANK)
    pages = MappedPages(files, {name: source.pieces(share) for name, source in tensors.sources.items()})
    places = {}
    for name, source in tensors.sources.items():
        places[name] = [files.mapped(tensor.name)[0].data_ptr() for tensor in source.tensors]
    used: list[int] = []
    for name, addresses in places.items():
        pages.proceed_to(name)
        assert [place for event, place in events if event == "release"] == used
        used += addresses
        ahead = [place for event, place in events if event == "ahead"]
        assert ahead[: len(used)] == used
        not_used = sum(
            tensor.nbytes for tensor in map(files.get, files.names) if tensor.data_ptr() in ahead[len(used) :]
        )
        assert not_used < 100_000 + 2 * 128 * 64 * 4  # the largest parameter, gate and up
    assert sorted(ahead) == sorted(set(ahead))
    assert not_used == 0


@pytest.mark.parametrize("quantization", ["int8", "int4", None])
def test_matrices_are_packed_from_the_files(quantization: str | None, tmp_path: Path) -> None:
    """A matrix that was copied, in its own type or in float32, would need the memory of a second one."""
    files, tensors = open_model(save(llama(**WIDE).bfloat16(), tmp_path))
    precision = Precision(torch.float32, quantization, torch.float32)  # type: ignore[arg-type]
    with load_weights(files, tensors, precision, CPU) as weights:
        for name in ("embedding.weight", "layers.0.qkv.weight", "layers.2.up.weight", "layers.1.down.weight"):
            matrix = weights.load_matrix(name)
            assert isinstance(matrix, RoundedWeight if quantization else FloatWeight)
            stored = [files.get(tensor.name) for tensor in tensors.sources[name].tensors]
            assert [part.data_ptr() for part in matrix.parts] == [part.data_ptr() for part in stored]
            assert matrix.shape == (sum(len(part) for part in stored), stored[0].shape[1])


def test_a_rank_reads_and_releases_its_own_rows(tmp_path: Path) -> None:
    """Most of the others' rows are never in memory. Of columns, a page has other ranks' too."""
    path = save(llama(**WIDE | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1}), tmp_path)
    files, tensors = open_model(path)
    precision, weights_file = Precision(torch.float32, None, torch.float32), path / "model.safetensors"
    name = "model.layers.0.mlp.gate_proj.weight"
    whole = files.get(name).nbytes
    with load_weights(files, tensors, precision, CPU, ParallelConfig(1, 4)) as weights:
        before = resident(weights_file)
        matrix = weights.load_matrix("layers.0.up.weight")
        gate, up = (part.clone() for part in matrix.parts)
        # It needs a quarter each of gate and up, and the system may map some more.
        assert whole // 2 <= resident(weights_file) - before < whole
        columns = weights.load_matrix("layers.0.down.weight").parts[0].clone()
        weights.load("final_norm.weight")
        assert resident(weights_file) <= before + 2 * os.sysconf("SC_PAGE_SIZE") * 3  # of three tensors' ends
    assert torch.equal(gate, files.get(name)[1024:2048])
    assert torch.equal(up, files.get(name.replace("gate", "up"))[1024:2048])
    assert torch.equal(columns, files.get(name.replace("gate", "down"))[:, 1024:2048])


def test_what_will_be_needed_is_read_from_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(2**22))
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    mapped = torch.from_file(str(path), size=2**22, dtype=torch.uint8)
    if cached(mapped):
        pytest.skip("the file system keeps all files in memory")
    will_need(mapped)
    wait_until(lambda: cached(mapped) == 2**22, describe=lambda: f"only {cached(mapped)} bytes were read")


def cached(mapped: Tensor) -> int:
    """Return the bytes of the file that the system has in memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    resident = (ctypes.c_ubyte * (mapped.nbytes // page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes), resident) == 0
    return sum(byte & 1 for byte in resident) * page

"""Loading puts every tensor on the device: shown on the meta device, where nothing else can meet what is there."""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels.load import reference
from kernels.quantized import FloatWeight, QuantizedWeight, Weight
from kernels.table_weight import TableWeight
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.models.device_copy import Copy, PinnedRing
from services.worker.models.fallback import build
from services.worker.models.fallback.build import TensorForDevice, build_model
from services.worker.models.fallback.linear import PackedLinear, pack_modules
from services.worker.models.load import match_family
from services.worker.models.parameters import RandomWeights, load_weights
from services.worker.models.precision import Precision
from services.worker.models.registry import read_supported
from services.worker.models.spec import DecoderSpec, parameter_shapes
from tests.models.fallback_models import deepseek_v3, granite
from tests.models.gptq_awq_writer import Scheme, save_packed
from tests.models.squeezellm_writer import TableScheme, save_tables
from tests.models.test_device_copy import LazyStream
from tests.models.tiny_models import llama, reference_logits, save

CPU, META = torch.device("cpu"), torch.device("meta")
BFLOAT16 = Precision(torch.bfloat16, None, torch.bfloat16)


def spec_of(path: Path) -> DecoderSpec:
    folder, implementation = read_supported(path, "auto")
    _, match = match_family(folder.config, implementation, "auto", None)
    assert match
    return match.spec


def test_random_weights_are_drawn_on_the_device(tmp_path: Path) -> None:
    """On a CPU by a generator of their own, on meta by none."""
    spec = spec_of(save(llama(), tmp_path))
    first, second = "layers.0.attention_norm.weight", "layers.1.mlp_norm.weight"
    state = torch.get_rng_state()
    weights = RandomWeights(spec, BFLOAT16, META)
    assert all(weights.load(name).is_meta for name in dict(parameter_shapes(spec)))
    matrix = weights.load_matrix("layers.0.qkv.weight")
    assert isinstance(matrix, torch.Tensor)
    assert matrix.is_meta
    on_cpu = RandomWeights(spec, BFLOAT16, CPU)
    drawn = [on_cpu.load(name) for name in (first, second)]
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in zip((first, second), drawn, strict=True):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        assert torch.equal(tensor, (torch.randn(tensor.shape, generator=generator) * 0.02 + 1).bfloat16())


def test_a_random_matrix_on_a_cpu_is_drawn_in_no_time(tmp_path: Path) -> None:
    """Its memory is that of a few rows, and yet no row is a combination of others."""
    spec = spec_of(save(llama(hidden_size=96), tmp_path))
    weights = RandomWeights(spec, BFLOAT16, CPU)
    matrices = [weights.load_matrix(f"layers.{layer}.out.weight") for layer in range(2)]
    first, second = (matrix.parts[0] for matrix in matrices if isinstance(matrix, FloatWeight))
    assert first.shape == second.shape == (96, 96)
    assert first.untyped_storage().nbytes() == (96 + 96 - 1) * 2
    assert torch.linalg.matrix_rank(first.float()) == 96
    assert not torch.equal(first, second)
    assert 0.015 < first.std() < 0.025


WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def load_on_meta(path: Path, name: str) -> Weight:
    folder, implementation = read_supported(path, "auto")
    files = WeightFiles(folder)
    _, match = match_family(folder.config, implementation, "auto", files)
    assert match
    assert match.tensors
    precision = Precision(torch.float32, files.quantization, torch.float32)  # type: ignore[arg-type]
    with load_weights(files, match.tensors, precision, META) as weights:
        return weights.load_matrix(name)


@pytest.mark.parametrize("scheme", [Scheme(act_order=True), Scheme(method="awq", symmetric=False)], ids=["gptq", "awq"])
def test_quantised_weights_are_packed_on_the_device(scheme: Scheme, tmp_path: Path) -> None:
    matrix = load_on_meta(save_packed(llama(**WIDE), tmp_path, scheme), "layers.0.out.weight")
    assert isinstance(matrix, QuantizedWeight)
    tensors = [matrix.quants, matrix.scales, *(part for part in (matrix.mins, matrix.order) if part is not None)]
    assert len(tensors) == 3  # with an order, or with mins
    assert all(tensor.is_meta for tensor in tensors)
    assert reference().pack_linear(matrix).is_meta


def test_tables_are_packed_on_the_device(tmp_path: Path) -> None:
    matrix = load_on_meta(save_tables(llama(**WIDE), tmp_path, TableScheme(outliers=0.02)), "layers.0.qkv.weight")
    assert isinstance(matrix, TableWeight)
    assert len(matrix.parts) == 3
    for part in matrix.parts:
        assert part.outliers
        assert all(tensor.is_meta for tensor in (part.codes, part.tables, *part.outliers))
    assert reference().pack_linear(matrix).is_meta


# models of transformers' code


def record_parameters_on_the_host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the parameters that are not on the device when the whole model is moved there."""
    left: list[str] = []
    move = nn.Module.to

    def recorded(module: nn.Module, device: torch.device) -> nn.Module:
        left.extend(name for name, parameter in module.named_parameters() if parameter.device != device)
        return move(module, device)

    monkeypatch.setattr(nn.Module, "to", recorded)
    return left


@pytest.mark.parametrize("make", [granite, deepseek_v3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_models_weights_go_to_the_device_one_by_one(
    make: Any, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time that the whole model is moved, only buffers that are in no file are left. One merges experts."""
    folder = ModelFolder.read(save(make().to(stored), tmp_path))
    left = record_parameters_on_the_host(monkeypatch)
    model = build_model(tmp_path, type(make()).__name__, WeightFiles(folder), torch.bfloat16, META)
    assert left == []
    tensors = [*model.parameters(), *model.buffers()]
    assert len(tensors) > 20
    assert all(tensor.is_meta for tensor in tensors)
    monkeypatch.undo()
    on_cpu = build_model(tmp_path, type(model).__name__, WeightFiles(folder), torch.bfloat16, CPU)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in model.named_parameters()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in on_cpu.named_parameters()
    }


@pytest.mark.parametrize("make", [granite, deepseek_v3])
def test_a_model_whose_tensors_went_one_by_one_is_the_same(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's memory is the host's here, and tensors come through a ring of pinned buffers."""
    model = make()
    folder = ModelFolder.read(save(model, tmp_path))
    stream = LazyStream()
    with torch.inference_mode():  # as in the worker
        ring = PinnedRing([torch.empty(1000, dtype=torch.uint8) for _ in range(2)], stream)

    class TensorForHost(TensorForDevice):
        def __init__(self, stored: Tensor, device: torch.device, copy: Copy) -> None:
            super().__init__(stored, CPU, ring.copy)

    monkeypatch.setattr(build, "TensorForDevice", TensorForHost)
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)
    loaded = build_model(tmp_path, type(model).__name__, WeightFiles(folder), torch.float32, META)
    assert stream.launched > 20
    tokens = [5, 9, 100, 3]
    assert torch.equal(reference_logits(loaded, tokens), reference_logits(model, tokens))


def test_random_weights_of_transformers_are_drawn_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(granite(), tmp_path)
    left = record_parameters_on_the_host(monkeypatch)
    state = torch.get_rng_state()
    on_cpu, same, _ = (
        build_model(tmp_path, "GraniteForCausalLM", None, torch.float32, device) for device in (CPU, CPU, META)
    )
    assert left == []
    assert all(map(torch.equal, on_cpu.parameters(), same.parameters()))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unpacked_weight_is_read_on_its_device() -> None:
    class Ops:
        """Packs by a copy; an index on the host would be accepted by torch, for a table on meta."""

        def pack_linear(self, weight: Tensor) -> Tensor:
            return weight.clone()

        def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
            assert ids.device == table.device
            return table[ids]

    model = nn.Sequential(nn.Linear(4, 3, device=META, dtype=torch.bfloat16))
    pack_modules(model, Ops())  # type: ignore[arg-type]
    packed = model[0]
    assert isinstance(packed, PackedLinear)
    assert packed.weight.is_meta
    assert packed.weight.shape == (3, 4)
    assert packed.weight.dtype == torch.bfloat16

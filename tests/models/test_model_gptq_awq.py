"""Tests what only GPTQ and AWQ checkpoints have: groups, zero points and an order of activations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels import quantized
from kernels.load import ops
from services.worker.checkpoint import quantization_config
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.config import WorkerConfig
from services.worker.models.load import load_model
from shared.errors import ModelError
from tests.models.gptq_awq_writer import Scheme, save_packed
from tests.models.quantized_checkpoints import (
    CPU,
    TOKENS,
    WIDE,
    Q,
    assert_rounded,
    compiled,
    logits,
    replace_tensor,
    weight_files,
)
from tests.models.tiny_models import llama, reference_logits


def test_the_config_and_the_kernels_have_the_same_group_size() -> None:
    assert quantization_config.QUANT_GROUP_SIZE == quantized.QUANT_GROUP_SIZE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_packed(llama(**WIDE), tmp_path, Scheme(symmetric=False))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_a_zero_point_of_0(bits: int, layout: str, tmp_path: Path) -> None:
    """LDG-07: GPTQ's first layout stores zero points less one, so that this one is the largest quant there."""
    model = llama(**WIDE)
    weight = model.get_submodule(Q).weight
    weight.data[:, :32].abs_()  # a group with a minimum of 0, and one with values of both signs
    folder = save_packed(model, tmp_path, Scheme(bits=bits, symmetric=False, layout=layout))
    zeros = load_file(folder / "model.safetensors")[f"{Q}.qzeros"]
    assert (zeros[0] == (0 if layout == "gptq_v2" else -1)).all()
    files = weight_files(folder)
    quantized = files.get_quantized(f"{Q}.weight")
    assert quantized is not None
    assert quantized.mins is not None
    assert (quantized.mins[:, 0] == 0).all()
    assert torch.equal(files.get(f"{Q}.weight"), weight)
    assert torch.equal(quantized.dequantize()[:, :32], weight[:, :32])


@pytest.mark.parametrize("desc_act", [True, False, None])
def test_g_idx_counts_where_it_is_meant(desc_act: bool | None, tmp_path: Path) -> None:
    """A g_idx that gives each group as many inputs counts, zeros never do, others contradict `desc_act` (LDG-26)."""
    models, folders = [], []
    for name, scheme in (("order", Scheme(act_order=True)), ("zeros", Scheme(g_idx="zeros"))):
        models.append(llama(**WIDE))
        folders.append(save_packed(models[-1], tmp_path / name, scheme))
        change(folders[-1], desc_act=desc_act)
        files = weight_files(folders[-1])
        assert all(torch.equal(files.get(name), weight) for name, weight in models[-1].state_dict().items())
    path = folders[1] / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{Q}.g_idx"][3] = 1
    save_file(tensors, path)
    if desc_act:
        with pytest.raises(ModelError, match=rf"{Q}\.g_idx must give each group 32 inputs"):
            weight_files(folders[1])
    else:
        assert torch.equal(weight_files(folders[1]).get(f"{Q}.weight"), models[1].get_submodule(Q).weight)


@compiled
def test_parts_of_a_product_with_inputs_in_different_orders_are_dequantised_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(**WIDE)
    folder = save_packed(model, tmp_path, Scheme(act_order=True), other=lambda name: name.endswith("1.mlp.up_proj"))
    theirs = reference_logits(model, TOKENS)
    ours, forward = logits(folder)
    assert forward.precision.name == "gptq"
    assert_rounded(ours, theirs)
    assert "2 tensors are dequantised, model.layers.1.mlp.gate_proj.weight the first" in caplog.text


@compiled
def test_scales_that_are_no_float16_are_dequantised_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(**WIDE)
    folder = save_packed(model, tmp_path, Scheme(scales=torch.float32))
    ours, _ = logits(folder, kv_cache_dtype="float32")
    assert (ours - reference_logits(model, TOKENS)).abs().max() < 1e-4
    assert "21 tensors are dequantised" in caplog.text
    caplog.clear()
    logits(save_packed(llama(**WIDE), tmp_path / "exact", Scheme(scales=torch.bfloat16)))
    assert not caplog.records


@compiled
def test_modules_that_were_not_converted_are_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stack with one plain matrix is dequantised. The output layer may be packed too."""
    model = llama(**WIDE, vocab_size=136)
    folder = save_packed(model, tmp_path, Scheme(), plain=lambda name: name == "model.layers.1.self_attn.k_proj")
    theirs = reference_logits(model, TOKENS)
    ours, _ = logits(folder, dtype="float32")
    assert (ours - theirs).abs().max() < 1e-4
    ours, _ = logits(folder)
    assert_rounded(ours, theirs)
    assert "2 tensors are dequantised, model.layers.1.self_attn.q_proj.weight the first" in caplog.text


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "fp8"},
        {"quant_method": "bitsandbytes"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": ""},
        {"bits": 2},
        {"bits": 3},
        {"group_size": 16},
        {"group_size": 48},
        {"group_size": 0},
        {"checkpoint_format": "marlin"},
        {"pack_dtype": "int8"},
        {"is_marlin_format": True},
        {"group_size": 2**40},
        {"dynamic": {"+:.*down_proj": {"bits": 8}}},
        {"dynamic": ["x"]},
        {"dynamic": 7},
        {"quant_method": "awq", "bits": 8},
        {"quant_method": "awq", "version": "GEMV"},
        {"quant_method": "awq", "backend": "llm-awq"},
    ],
    ids=str,
)
def test_other_kinds_are_refused_by_name(folder: Path, fields: dict[str, Any]) -> None:
    change(folder, **fields)
    name, value = list(fields.items())[-1]
    said = next(iter(value)) if isinstance(value, dict) else value
    with pytest.raises(ModelError, match=f"{folder}: config.json: quantization_config: {name} ") as error:
        load_model(folder, WorkerConfig(device="cpu"), CPU, ops(CPU))
    assert repr(said.lower() if name == "version" else said) in str(error.value)
    assert "gptq with 4 or 8 bits and awq with 4" in str(error.value)


@pytest.mark.parametrize("fields", [{"dynamic": {"-:.*lm_head": {}}}, {"checkpoint_format": None}, {"damp": 0.1}])
def test_what_asks_for_nothing_is_taken(folder: Path, fields: dict[str, Any]) -> None:
    change(folder, **fields)
    assert ModelFolder.read(folder).quantization is not None


@pytest.mark.parametrize(
    ("kind", "tensor", "said"),
    [
        ("scales", None, "is missing"),
        ("qzeros", None, "is missing"),
        ("scales", torch.ones(3, 64), r"has shape \[3, 64\], and its quants need \[2, 64\]"),
        ("scales", torch.ones(2, 64, dtype=torch.int8), "must be a matrix of floats"),
        ("qzeros", torch.zeros(2, 4, dtype=torch.int32), r"has shape \[2, 4\]"),
        ("qweight", torch.zeros(8, 64), "must be a matrix of int32"),
        ("qweight", torch.zeros(7, 64, dtype=torch.int32), "inputs"),
        ("qweight", torch.zeros(0, 64, dtype=torch.int32), "is of 0 inputs and 64 outputs"),
        ("qweight", torch.zeros(8, 0, dtype=torch.int32), "is of 64 inputs and 0 outputs"),
        ("g_idx", torch.zeros(64, dtype=torch.complex64), "must name groups from 0 to 1"),
        ("g_idx", torch.full((64,), 2, dtype=torch.int32), "must name groups from 0 to 1"),
        ("g_idx", torch.zeros(32, dtype=torch.int32), r"has shape \[32\]"),
        ("weight", torch.zeros(64, 64), "is there twice"),
    ],
)
def test_what_does_not_fit_is_named(folder: Path, kind: str, tensor: Tensor | None, said: str) -> None:
    replace_tensor(folder, f"{Q}.{kind}", tensor)
    with pytest.raises(ModelError, match=rf"{Q}\.{kind} .*{said}"):
        load_model(folder, WorkerConfig(device="cpu"), CPU, ops(CPU))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_one_group_of_no_inputs_is_named(method: str, tmp_path: Path) -> None:
    folder = save_packed(llama(**WIDE), tmp_path, Scheme(method=method, group_size=-1))
    path = folder / "model.safetensors"
    empty = {name: tensor[:0] for name, tensor in load_file(path).items() if name.startswith(f"{Q}.")}
    save_file(load_file(path) | empty, path)
    with pytest.raises(ModelError, match=rf"{Q}\.qweight is of 0 inputs"):
        load_model(folder, WorkerConfig(device="cpu"), CPU, ops(CPU))


def test_a_checkpoint_of_floats_that_says_gptq_is_refused(tmp_path: Path) -> None:
    folder = save_packed(llama(**WIDE), tmp_path, Scheme(), plain=lambda name: True)
    with pytest.raises(ModelError, match=r"config\.json says gptq, but the weight files have no tensor with quants"):
        load_model(folder, WorkerConfig(device="cpu"), CPU, ops(CPU))

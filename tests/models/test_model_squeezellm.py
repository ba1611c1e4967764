"""Tests what only SqueezeLLM checkpoints have: tables and outliers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.cpu import extension
from kernels.load import ops
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.config import WorkerConfig
from services.worker.models.load import load_model
from shared.errors import ModelError
from tests.models.family_variants import mixtral
from tests.models.peft_adapters import adapted, make_adapter
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
from tests.models.squeezellm_writer import TableScheme, as_published, quantize, save_tables
from tests.models.test_model_lora import logits_with
from tests.models.tiny_models import llama, reference_logits, save, set_config

SCHEMES = {
    "dense": TableScheme(),
    "outliers": TableScheme(outliers=0.02),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tables(llama(**WIDE), tmp_path, TableScheme(outliers=0.02, full_rows=2))


def test_the_layout_is_that_of_the_published_kernels(tmp_path: Path) -> None:
    """Word i of an output has the codes of inputs 8 i to 8 i + 7, the first in the lowest bits."""
    folder = save_tables(llama(**WIDE), tmp_path, TableScheme())
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{Q}.lookup_table"] = torch.arange(64 * 16.0).view(64, 16).half()
    tensors[f"{Q}.qweight"][2, 5] = 0x76543210
    tensors |= {f"{Q}.rows": torch.zeros(65, dtype=torch.int64), f"{Q}.cols": torch.tensor([17, 9]).int()}
    tensors |= {f"{Q}.vals": torch.tensor([0.5, -2000.0], dtype=torch.float32)}
    tensors[f"{Q}.rows"][6:] = 1
    tensors[f"{Q}.rows"][64] = 2
    save_file(tensors, path)
    weight = weight_files(folder).get(f"{Q}.weight")
    expected = 5 * 16 + torch.arange(8.0)
    expected[1] += 0.5
    assert torch.equal(weight[5, 16:24], expected)
    assert weight[63, 9] < -900


def test_a_checkpoint_as_it_was_published_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pickle with settings among its tensors, and a quant_config.json."""
    model = llama(**WIDE)
    scheme = TableScheme(outliers=0.02, full_rows=2, tables=torch.float32)
    folder = as_published(save_tables(model, tmp_path, scheme))
    ours, _ = logits(folder, dtype="float32")
    assert (ours - reference_logits(model, TOKENS)).abs().max() < 1e-4
    if extension.load():
        assert logits(folder, quantization="squeezellm")[1].precision.name == "squeezellm"
    assert not caplog.records
    (folder / "quant_config.json").write_text(json.dumps({"wbits": 3}))
    with pytest.raises(ModelError, match=r"quant_config\.json: wbits 3 is not supported .*squeezellm with 4 bits"):
        ModelFolder.read(folder)


@compiled
def test_a_tied_head_that_is_packed_is_the_embedding_too(tmp_path: Path) -> None:
    model = llama(**WIDE, vocab_size=136, tie_word_embeddings=True)
    folder = save_tables(model, tmp_path, TableScheme(outliers=0.02), plain=lambda name: False)
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != "model.embed_tokens.weight"}
    save_file(tensors, path)
    theirs = reference_logits(model, TOKENS)
    assert (logits(folder, dtype="float32")[0] - theirs).abs().max() < 1e-4
    ours, _ = logits(folder)
    assert_rounded(ours, theirs)


@pytest.mark.parametrize("scheme", ["dense", "outliers"])
def test_experts_may_have_tables(scheme: str, tmp_path: Path) -> None:
    """Transformers joins the experts of a layer in one parameter, so they are packed in the file."""
    model = mixtral(**WIDE)
    folder = save_tables(model, tmp_path / "packed", SCHEMES[scheme], plain=lambda name: "head" in name)
    tensors, dequantized = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if ".experts." in name]:
        parts, dequantized[name] = quantize(tensors.pop(name), SCHEMES[scheme])
        tensors |= {f"{name.removesuffix('.weight')}.{kind}": part for kind, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    plain = save(model, tmp_path / "plain")
    save_file(load_file(plain / "model.safetensors") | dequantized, plain / "model.safetensors")
    theirs, _ = logits(plain, dtype="float32")
    assert (logits(folder, dtype="float32")[0] - theirs).abs().max() < 1e-4
    if extension.load():
        ours, forward = logits(folder)
        assert forward.precision.name == "squeezellm"
        errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        assert 1e-4 < errors.median() < 0.2  # rounding sends some tokens to other experts


@compiled
def test_a_matrix_with_a_plain_part_is_dequantised_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(**WIDE)
    names = ("lm_head", "model.layers.1.self_attn.k_proj")
    folder = save_tables(model, tmp_path, TableScheme(), plain=lambda name: name in names)
    theirs = reference_logits(model, TOKENS)
    ours, _ = logits(folder)
    assert_rounded(ours, theirs)
    assert "2 tensors are dequantised, model.layers.1.self_attn.q_proj.weight the first" in caplog.text


@compiled
@pytest.mark.parametrize("scheme", ["dense", "outliers"])
def test_adapters_are_added_to_it(scheme: str, tmp_path: Path) -> None:
    model = llama(**WIDE, vocab_size=512)
    folder = save_tables(model, tmp_path / "model", SCHEMES[scheme])
    adapter = make_adapter(model, tmp_path / "adapter", r=8, target_modules="all-linear")
    theirs, plain = reference_logits(adapted(model, adapter, merged=False), TOKENS), reference_logits(model, TOKENS)
    ours = logits_with(folder, adapter, TOKENS)
    assert (theirs - plain).norm() / theirs.norm() > 0.3  # or the comparison would mean nothing
    assert (ours - theirs).norm() / theirs.norm() < 0.2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quant_method": "squeezellm", "wbits": 3}, "wbits 3 is not supported"),
        ({"quant_method": "squeezellm", "bits": 8}, "bits 8 is not supported"),
        ({"quant_method": "squeezellm"}, "bits None is not supported"),
        ({"quant_method": "squeezellm", "wbits": 4, "bits": 3}, "bits is 3, and wbits is 4"),
    ],
)
def test_other_bits_are_refused(folder: Path, fields: dict[str, Any], said: str) -> None:
    set_config(folder, quantization_config=fields)
    with pytest.raises(ModelError, match=f"config.json: quantization_config: {said}"):
        load_model(folder, WorkerConfig(device="cpu"), CPU, ops(CPU))


def test_a_settings_file_with_groups_is_not_squeezellms(folder: Path) -> None:
    set_config(folder, "quantization_config")
    (folder / "quant_config.json").write_text(json.dumps({"wbits": 4, "group_size": 32}))
    folder_settings = ModelFolder.read(folder).quantization
    assert folder_settings is not None
    assert folder_settings.method == "awq"


ROWS = torch.zeros(65, dtype=torch.int32)


@pytest.mark.parametrize(
    ("kind", "tensor", "said"),
    [
        ("lookup_table", None, "is missing"),
        ("lookup_table", torch.ones(64, 8).half(), r"has shape \[64, 8\], and its codes need \[64, 16\]"),
        ("lookup_table", torch.ones(63, 16).half(), r"has shape \[63, 16\]"),
        ("lookup_table", torch.ones(64, 16, dtype=torch.int8), "must be of floats"),
        ("lookup_table", torch.full((64, 16), torch.inf), "has values that are not finite"),
        ("qweight", torch.zeros(8, 64), "must be a matrix of int32"),
        ("qweight", torch.zeros(8, 64, 1, dtype=torch.int32), "must be a matrix of int32"),
        ("qweight", torch.zeros(7, 64, dtype=torch.int32), "is of 56 inputs, which is no multiple of 32"),
        ("qweight", torch.zeros(0, 64, dtype=torch.int32), "is of 0 inputs"),
        ("weight", torch.zeros(64, 64), "is there twice"),
        ("rows", None, "is missing"),
        ("cols", None, "is missing"),
        ("vals", None, "is missing"),
        ("rows", ROWS.float(), "must be of 65 integers, and is torch.float32"),
        ("rows", ROWS[:64], "must be of 65 integers, and is torch.int32 .64."),
        ("rows", ROWS - 1, "must begin with 0 and never fall"),
        ("cols", ROWS[:3], r"must be of \d+ integers, and is torch.int32 .3."),
        ("vals", torch.zeros(3), r"has shape .3., and its codes need .\d+."),
        ("vals", ROWS, "must be of floats"),
        ("full_rows", None, "is missing"),
        ("full_row_indices", None, "is missing"),
        ("full_row_indices", torch.zeros(1, 2).int(), "must be of 2 integers"),
        ("full_row_indices", torch.tensor([1, 64]).int(), "must have numbers from 0 to 63"),
        ("full_rows", torch.zeros(64, 3), r"has shape \[64, 3\], and its codes need \[64, 2\]"),
    ],
)
def test_what_does_not_fit_is_named(folder: Path, kind: str, tensor: Tensor | None, said: str) -> None:
    replace_tensor(folder, f"{Q}.{kind}", tensor)
    with pytest.raises(ModelError, match=rf"{Q}\.{kind} .*{said}"):
        load_model(folder, WorkerConfig(device="cpu"), CPU, ops(CPU))


@pytest.mark.parametrize(
    ("kind", "index", "value", "said"),
    [
        ("rows", 0, 1, "must begin with 0 and never fall"),
        ("rows", 30, 80, "must begin with 0 and never fall"),
        ("cols", 2, -1, "must have numbers from 0 to 63"),
        ("cols", 2, 64, "must have numbers from 0 to 63"),
        ("vals", 2, torch.nan, "has values that are not finite"),
        ("full_rows", (3, 1), torch.inf, "has values that are not finite"),
    ],
)
def test_a_wrong_number_is_named(folder: Path, kind: str, index: Any, value: float, said: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{Q}.{kind}"][index] = value
    save_file(tensors, path)
    with pytest.raises(ModelError, match=rf"{Q}\.{kind} .*{said}"):
        load_model(folder, WorkerConfig(device="cpu"), CPU, ops(CPU))


def test_a_matrix_of_another_size_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for kind in ("qweight", "rows", "cols", "vals", "full_rows", "full_row_indices", "startrows", "lookup_table"):
        del tensors[f"{Q}.{kind}"]
    tensors |= {f"{Q}.qweight": torch.zeros(4, 64, dtype=torch.int32), f"{Q}.lookup_table": torch.ones(64, 16)}
    save_file(tensors, path)
    with pytest.raises(ModelError, match=rf"{Q}\.weight has shape \[64, 32\], and config\.json says \[64, 64\]"):
        load_model(folder, WorkerConfig(device="cpu"), CPU, ops(CPU))

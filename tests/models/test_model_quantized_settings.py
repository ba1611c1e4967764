"""Tests quantisation settings in files beside config.json, in the spellings of the tools that write them (LDG-25)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kernels.load import ops
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.config import WorkerConfig
from services.worker.models.fingerprint import weights_digest
from services.worker.models.load import load_model
from services.worker.models.registry import read_supported
from shared.errors import ModelError
from tests.models.fallback_models import stablelm
from tests.models.gptq_awq_writer import Scheme, save_packed
from tests.models.tiny_models import Forward, llama, reference_logits, set_config

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = list(range(3, 40))

GPTQ, AWQ = "quantize_config.json", "quant_config.json"
AUTOGPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True, "true_sequential": True}
AUTOAWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


def beside(model: PreTrainedModel, folder: Path, scheme: Scheme, **files: dict[str, Any]) -> Path:
    """Return the model folder with these files in place of its `quantization_config`."""
    save_packed(model, folder, scheme)
    set_config(folder, "quantization_config")
    for name, settings in files.items():
        (folder / f"{name}.json").write_text(json.dumps(settings))
    return folder


def assert_exact(model: PreTrainedModel, folder: Path) -> None:
    files = WeightFiles(ModelFolder.read(folder))
    assert any(files.is_quantized(name) for name in files.names)
    assert all(torch.equal(files.get(name), weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("scheme", "file", "settings"),
    [
        (Scheme(), GPTQ, AUTOGPTQ),
        (Scheme(), GPTQ, {"bits": 4, "group_size": 32}),
        (Scheme(bits=8), GPTQ, AUTOGPTQ | {"bits": 8}),
        (Scheme(group_size=-1), GPTQ, AUTOGPTQ | {"group_size": -1}),
        (Scheme(act_order=True), GPTQ, AUTOGPTQ | {"desc_act": True}),
        (Scheme(symmetric=False), GPTQ, AUTOGPTQ | {"sym": False, "checkpoint_format": "gptq", "quant_method": "gptq"}),
        (Scheme(symmetric=False, layout="gptq_v2"), GPTQ, AUTOGPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}),
        (Scheme(symmetric=False, layout="gptq_v2"), GPTQ, AUTOGPTQ | {"format": "gptq_v2", "method": "gptq"}),
        (Scheme(), GPTQ, AUTOGPTQ | {"quant_method": None, "checkpoint_format": None}),
        (Scheme(), AWQ, AUTOGPTQ | {"quant_method": "gptq"}),
        (Scheme("awq", symmetric=False), AWQ, AUTOAWQ),
        (Scheme("awq", symmetric=False), AWQ, {"bits": 4, "group_size": 32}),
        (Scheme("awq", symmetric=False), AWQ, AUTOAWQ | {"version": "gemm", "modules_to_not_convert": None}),
        (Scheme("awq", symmetric=False), AWQ, {"zero_point": True, "bits": 4, "group_size": 32}),
        (Scheme("awq", symmetric=False, group_size=-1), AWQ, AUTOAWQ | {"q_group_size": -1}),
        (Scheme("awq", symmetric=False), GPTQ, AUTOAWQ),
        (Scheme("awq", symmetric=False), GPTQ, {"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemm"}),
    ],
    ids=str,
)
def test_settings_are_read_from_the_file_beside(
    scheme: Scheme, file: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(**WIDE)
    folder = beside(model, tmp_path, scheme, **{file.removesuffix(".json"): settings})
    assert_exact(model, folder)
    forward = Forward(folder, dtype="float32")
    forward.enter(0, TOKENS, range(10))
    ours = forward.step((0, 0, len(TOKENS)))[0]
    assert (ours - reference_logits(model, TOKENS)).abs().max() < 1e-4
    assert not caplog.records


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_other_spellings_are_read_in_the_config_too(method: str, tmp_path: Path) -> None:
    model, folder = llama(**WIDE), tmp_path
    save_packed(model, folder, Scheme(method, symmetric=False))
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": method, "w_bit": 4, "q_group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    assert_exact(model, folder)


def test_the_file_beside_is_read_for_transformers_code_too(tmp_path: Path) -> None:
    model = stablelm(hidden_size=64, intermediate_size=128, num_attention_heads=4)
    folder = beside(model, tmp_path, Scheme(), quantize_config=AUTOGPTQ)
    forward = Forward(folder)
    forward.enter(0, TOKENS, range(10))
    assert (forward.step((0, 0, len(TOKENS)))[0] - reference_logits(model, TOKENS)).abs().max() < 1e-4


def test_the_config_counts_and_a_conflict_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama(**WIDE)
    folder = save_packed(model, tmp_path, Scheme(symmetric=False))
    same, other = AUTOGPTQ | {"quant_method": None, "desc_act": True}, AUTOGPTQ | {"checkpoint_format": "gptq_v2"}
    for text, said in ((json.dumps(same), False), (json.dumps(other), True), ('{"bits": 3}', True), ("{", True)):
        (folder / GPTQ).write_text(text)
        caplog.clear()
        load_model(folder, WorkerConfig(device="cpu"), CPU, ops(CPU))
        assert ("config.json and quantize_config.json say different things" in caplog.text) is said
        assert_exact(model, folder)


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    folder = beside(llama(**WIDE), tmp_path, Scheme(), quantize_config=AUTOGPTQ, quant_config=AUTOAWQ)
    with pytest.raises(ModelError, match=r"quantize_config\.json and quant_config\.json say different things"):
        read_supported(folder)
    (folder / AWQ).write_text(json.dumps({"bits": 4, "w_bit": 8, "group_size": 32}))
    with pytest.raises(ModelError, match=r"quant_config\.json: bits is 4, and w_bit is 8"):
        read_supported(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 3}, "bits 3 is not supported"),
        ({"group_size": 48}, "group_size 48 is not supported"),
        ({"group_size": None}, "group_size is missing"),
        ({"group_size": "32"}, "group_size: Expected `int`, got `str`"),
        ({"group_size": None, "q_group_size": 16}, "q_group_size 16 is not supported"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ({"quant_method": "awq", "version": "GEMV"}, "version 'gemv' is not supported"),
        ({"quant_method": "awq", "checkpoint_format": "gemv"}, "checkpoint_format 'gemv' is not supported"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported"),
    ],
    ids=str,
)
def test_other_kinds_are_refused_by_the_name_of_the_file(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = beside(llama(**WIDE), tmp_path, Scheme(), quantize_config=AUTOGPTQ | changes)
    with pytest.raises(ModelError, match=rf"{folder}: quantize_config\.json: {said}"):
        read_supported(folder)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = beside(llama(**WIDE), tmp_path, Scheme())
    for text in ("{", '{"a":' * 100_000):
        (folder / GPTQ).write_text(text)
        with pytest.raises(ModelError, match=rf"{folder}: quantize_config\.json: "):
            read_supported(folder)


def test_the_file_beside_is_part_of_what_the_weights_are(tmp_path: Path) -> None:
    """The same quants stand for other values in another layout."""
    folder = beside(llama(**WIDE), tmp_path, Scheme(), quantize_config=AUTOGPTQ)
    paths = [folder / "model.safetensors"]
    before = weights_digest(ModelFolder.read(folder), paths)
    (folder / GPTQ).write_text(json.dumps(AUTOGPTQ | {"checkpoint_format": "gptq_v2"}))
    assert weights_digest(ModelFolder.read(folder), paths) != before

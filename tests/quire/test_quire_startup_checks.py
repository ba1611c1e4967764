"""Tests that ranks which cannot divide a model are refused before any of them starts."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from quire.startup_checks import check_model
from services.worker.config import WorkerConfig
from shared.errors import ConfigError, ModelError, QuireError
from tests.models.fallback_models import granite
from tests.models.family_variants import gpt2
from tests.models.tiny_models import llama, save, set_config

MAKERS = {"llama": llama, "gpt2": gpt2, "granite": granite}  # of 6, 5 and 4 heads, and 3 layers


def model_folder(name: str, folder: Path) -> Path:
    save(MAKERS[name](), folder)
    Tokenizer(BPE()).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("name", "sizes", "error", "said"),
    [
        ("llama", {"tensor_parallel_size": 4}, ModelError, "attention heads, 6, cannot be divided by it"),
        ("llama", {"pipeline_parallel_size": 4}, ModelError, "the model has 3 layers, fewer than stages"),
        ("llama", {"tensor_parallel_size": 3, "pipeline_parallel_size": 3}, None, ""),
        ("gpt2", {"tensor_parallel_size": 2}, ModelError, "attention heads, 5, cannot be divided by it"),
        ("gpt2", {"pipeline_parallel_size": 64}, ModelError, "the model has 3 layers, fewer than stages"),
        ("granite", {"tensor_parallel_size": 2}, ConfigError, "--tensor-parallel-size needs a family of Quire's own"),
    ],
)
def test_ranks_that_cannot_divide_the_model(
    name: str, sizes: dict[str, Any], error: type[QuireError] | None, said: str, tmp_path: Path
) -> None:
    folder = model_folder(name, tmp_path)
    if error is None:
        check_model(folder, WorkerConfig(**sizes))
        return
    with pytest.raises(error, match=said):
        check_model(folder, WorkerConfig(**sizes))


def test_the_text_model_is_divided_among_images(tmp_path: Path) -> None:
    folder = model_folder("llama", tmp_path)
    set_config(folder, "num_attention_heads", text_config={"num_attention_heads": 7, "num_hidden_layers": 3})
    with pytest.raises(ModelError, match=rf"^{folder}: --tensor-parallel-size 2: .*heads, 7, cannot be divided"):
        check_model(folder, WorkerConfig(tensor_parallel_size=2))


@pytest.mark.parametrize("value", [None, "six", 0, [], True])
def test_sizes_that_are_none_are_left_to_the_ranks(value: object, tmp_path: Path) -> None:
    folder = model_folder("llama", tmp_path)
    set_config(folder, num_attention_heads=value, num_hidden_layers=value)
    check_model(folder, WorkerConfig(tensor_parallel_size=2))
    check_model(folder)

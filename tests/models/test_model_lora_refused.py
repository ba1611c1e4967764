"""Adapters that do not fit are refused by the name of the tensor or field, at once, and nothing of them is kept."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.load import ops
from services.worker.config import WorkerConfig
from services.worker.models.adapters import peft_config
from services.worker.models.load import load_model
from shared.errors import ConfigError, ModelError
from tests.models.fallback_models import stablelm
from tests.models.family_variants import mixtral, qwen3_moe
from tests.models.forward import CPU, Forward
from tests.models.peft_adapters import make_adapter, rewrite_adapter, set_adapter_config
from tests.models.tiny_models import llama, save

Tensors = dict[str, Tensor]
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"
DOWN = "base_model.model.model.layers.2.mlp.down_proj"


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Forward:
    return Forward(save(llama(), tmp_path_factory.mktemp("model")), enable_lora=True, max_lora_rank=6)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(llama(), tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    """A copy for the test to change."""
    return shutil.copytree(original, tmp_path / "adapter")


def assert_refused(forward: Forward, adapter: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        forward.adapters.load(5, str(adapter))
    assert str(adapter) in str(caught.value)
    with pytest.raises(ModelError, match="adapter 5 was not loaded"):
        forward.adapters.put(0, 5)


def renamed(before: str, after: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(before, after): tensor for name, tensor in tensors.items()}


def with_tensor(name: str, tensor: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensor}


def without(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}


A, B = f"{DOWN}.lora_A.weight", f"{DOWN}.lora_B.weight"
HEAD = "base_model.model.lm_head.lora_A.weight"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
MAGNITUDES = f"{Q_PROJ}.lora_magnitude_vector"

TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "unknown module": (renamed("q_proj", "query"), r"query\.lora_A\.weight does not fit: the model has no such linear"),
    "another layer": (renamed("layers.2.", "layers.3."), r"layers\.3\..* does not fit: the model has no such linear"),
    "head": (with_tensor(HEAD, torch.ones(5, 60)), f"{HEAD} does not fit: adapters cannot change this module"),
    "embedding": (with_tensor(EMBEDDING, torch.ones(5, 131)), f"{EMBEDDING} is not supported"),
    "magnitudes": (with_tensor(MAGNITUDES, torch.ones(60)), f"{MAGNITUDES} is not supported"),
    "no prefix": (renamed("base_model.model.", ""), "tensor model.layers.0.* is not supported"),
    "no B": (without(B), f"{B} is missing"),
    "no module": (without(DOWN), f"{A} is missing, and target_modules names its module"),
    "inputs": (with_tensor(A, torch.ones(5, 76)), rf"{A} has shape \[5, 76\], not \[5, 77\]"),
    "outputs": (with_tensor(B, torch.ones(59, 5)), rf"{B} has shape \[59, 5\], not \[60, 5\]"),
    "rank": (with_tensor(A, torch.ones(4, 77)), rf"{A} has shape \[4, 77\], not \[5, 77\]"),
    "type": (with_tensor(A, torch.ones(5, 77, dtype=torch.int8)), f"{A} is of torch.int8"),
    "not finite": (with_tensor(A, torch.full((5, 77), torch.inf)), f"{A} has numbers that are not finite"),
    "empty": (lambda _: {}, "it has no tensors"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(forward: Forward, adapter: Path, name: str) -> None:
    change, words = TENSORS[name]
    rewrite_adapter(adapter, change)
    assert_refused(forward, adapter, words)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora is not supported"),
    "bias": ({"bias": "all"}, "bias 'all' is not supported"),
    "bias of B": ({"lora_bias": True}, "lora_bias is not supported"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    "new tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices is not supported"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is not supported"),
    "another method": ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    "changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the model's own weights"),
    "rank": ({"r": 7}, r"rank 7, above --max-lora-rank 6"),
    "rank of a module": ({"rank_pattern": {"down_proj": 64}}, "down_proj.lora_A.* has rank 64, above --max"),
    "no rank": ({"r": 0}, "a rank must be at least 1"),
    "modules": ({"target_modules": ["q_proj"]}, "target_modules does not name its module"),
    "no modules": ({"target_modules": None}, "target_modules"),
    "factor": ({"lora_alpha": 1e300}, "lora_B.weight has numbers that are not finite"),
    "type": ({"r": "many"}, "adapter_config.json: Expected `int`"),
    "expression": ({"rank_pattern": {"(": 3}}, "'\\(' is no regular expression"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(forward: Forward, adapter: Path, name: str) -> None:
    changes, words = CONFIGS[name]
    set_adapter_config(adapter, **changes)
    assert_refused(forward, adapter, words)


@pytest.mark.parametrize(
    "field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"]
)
def test_an_expression_that_takes_years_does_not_hold_the_interpreter(
    forward: Forward, adapter: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_config, "MATCHING_TIME", 0.2)
    endless = 10 * "(.+?)" + "Z|(?!)"  # the last part hides from the library that there must be a Z
    changes = {field: {endless: 3} if field in ("rank_pattern", "alpha_pattern") else endless}
    set_adapter_config(adapter, **({"layers_to_transform": [0]} if field == "layers_pattern" else {}), **changes)
    turns, over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.wait(0.01):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        assert_refused(forward, adapter, "takes too long to be matched with model.layers")
    finally:
        over.set()
        thread.join()
    assert turns > 3


def test_files(forward: Forward, adapter: Path, tmp_path: Path) -> None:
    assert_refused(forward, tmp_path / "absent", "absent is no adapter's folder")
    weights = adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert_refused(forward, adapter, "adapter_model.safetensors cannot be read")
    weights.unlink()
    assert_refused(forward, adapter, "none of adapter_model.safetensors, adapter_model.bin is there")
    (adapter / "adapter_config.json").write_text("{")
    assert_refused(forward, adapter, "adapter_config.json")


def test_a_pipe_is_not_waited_for(forward: Forward, adapter: Path) -> None:
    for name, words in (("adapter_model.safetensors", "none of adapter_model"), ("adapter_config.json", "is no file")):
        (adapter / name).unlink()
        os.mkfifo(adapter / name)
        assert_refused(forward, adapter, words)


def test_numbers_that_the_type_of_the_weights_lacks(adapter: Path, tmp_path: Path) -> None:
    """float16 ends at 65,504; the rest would be infinite."""
    half = Forward(save(llama(), tmp_path / "model"), enable_lora=True, max_lora_rank=6, dtype="float16")
    rewrite_adapter(adapter, with_tensor(A, torch.full((5, 77), 1e5)))
    assert_refused(half, adapter, f"{A} has numbers that are not finite as torch.float16")


def test_a_pickle_that_is_more_than_tensors(forward: Forward, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"a": adapter}, adapter / "adapter_model.bin")
    assert_refused(forward, adapter, "adapter_model.bin cannot be read")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_and_routers(name: str, tmp_path: Path) -> None:
    """Attention takes adapters; what is computed for some tokens only does not."""
    model = mixtral() if name == "mixtral" else qwen3_moe()
    forward = Forward(save(model, tmp_path / "model"), enable_lora=True)
    modules = ["q_proj", "o_proj"]
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=modules)
    forward.adapters.load(1, str(adapter))
    set_adapter_config(adapter, target_modules=[*modules, "gate", "w1", "gate_proj"])
    experts = {
        "mixtral": ("block_sparse_moe.experts.2.w1", "block_sparse_moe.gate"),
        "qwen3_moe": ("mlp.experts.2.gate_proj", "mlp.gate"),
    }
    for module in experts[name]:
        tensor = f"base_model.model.model.layers.1.{module}.lora_A.weight"
        rewrite_adapter(adapter, lambda tensors, tensor=tensor: {tensor: torch.ones(5, 60)} | tensors)
        assert_refused(forward, adapter, f"{module}.lora_A.weight does not fit: adapters cannot change this module")
        rewrite_adapter(adapter, lambda tensors, tensor=tensor: {n: v for n, v in tensors.items() if n != tensor})


def test_transformers_code_takes_no_adapters(tmp_path: Path) -> None:
    folder, forward_config = save(stablelm(), tmp_path), WorkerConfig(enable_lora=True)
    with pytest.raises(ConfigError, match="--enable-lora needs a family of Quire's own"):
        load_model(folder, forward_config, CPU, ops(CPU))


def test_settings() -> None:
    with pytest.raises(ConfigError, match="--max-cpu-loras 2 is less than --max-loras 3"):
        WorkerConfig(max_loras=3, max_cpu_loras=2)
    assert WorkerConfig(max_loras=3).num_host_adapters == 3
    assert WorkerConfig(max_loras=3, max_cpu_loras=5).num_host_adapters == 5

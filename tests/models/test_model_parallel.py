"""Tests that ranks that divide a model compute what one alone computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType
from transformers import PreTrainedModel

from benchmarks.quantized_checkpoints import type_in
from kernels.cpu import extension
from services.worker.parallel_config import ONE_RANK
from shared.gguf.folder import model_folder
from tests.gguf.gguf_writer import write
from tests.models.family_variants import WINDOW, gemma3, gpt2, mixtral, phi3, qwen3, qwen3_moe
from tests.models.gptq_awq_writer import Scheme, save_packed
from tests.models.parallel_ranks import Case, compute, compute_all
from tests.models.peft_adapters import make_adapter
from tests.models.tiny_models import llama, opt, save

# Four ranks divide heads and inner sizes, and two of them have the same head of keys and values. They do not divide the
# vocabulary.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
}
OPT_SIZES: dict[str, Any] = {"num_attention_heads": 4, "ffn_dim": 76}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(**SIZES),
    "llama, tied": lambda: llama(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen3": lambda: qwen3(**SIZES),
    "mixtral": lambda: mixtral(**SIZES, sliding_window=WINDOW),
    "qwen3_moe": lambda: qwen3_moe(**SIZES, moe_intermediate_size=32, mlp_only_layers=[0]),
    "gemma3": lambda: gemma3(**SIZES),
    "phi3": lambda: phi3(**SIZES),
    "gpt2": lambda: gpt2(n_head=4),
    "opt": lambda: opt(**OPT_SIZES),
    "opt, 350m's shape": lambda: opt(**OPT_SIZES, do_layer_norm_before=False, word_embed_proj_dim=24),
}

STACKED = ("mixtral",)
"""Models whose checkpoints have all experts of a layer in one tensor."""

# Two ranks have whole groups of 32 inputs, and whole words of quants.
WIDE = SIZES | {"intermediate_size": 128}
PACKED = {
    "gptq": Scheme(symmetric=False, group_size=64),
    "gptq, order of activations": Scheme(act_order=True),
    "awq": Scheme(method="awq", symmetric=False),
}


# Two ranks have whole groups of 32 inputs, and parts of blocks of 256.
WIDER = SIZES | {"hidden_size": 256, "intermediate_size": 768, "initializer_range": 0.15}


def gguf_type(name: str) -> GGMLQuantizationType:
    """Return a type: one that matmuls take for most matrices, and one that is dequantised for some."""
    if "norm" in name or "ffn_down" in name:
        return GGMLQuantizationType.F32 if "norm" in name else GGMLQuantizationType.MXFP4
    return GGMLQuantizationType.Q4_0 if "attn" in name else GGMLQuantizationType.Q8_0


def q4_k_m(name: str) -> GGMLQuantizationType:
    """Return the type in files of Q4_K_M."""
    return type_in("Q4_K_M", name, 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    path = tmp_path_factory.mktemp("models")
    return {
        name: Case(name, save(make(), path / name, save_original_format=name not in STACKED))
        for name, make in MODELS.items()
    }


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    path = tmp_path_factory.mktemp("adapted")
    cases = {}
    for name in ("llama", "phi3", "gpt2"):  # matrices of their own, several in one, and transposed ones
        model = MODELS[name]()
        folder, adapter = save(model, path / name), make_adapter(model, path / f"{name}-adapter")
        cases[name] = Case(f"{name}, adapter", folder, adapter=adapter)
    return cases


def error_of_ranks(cases: list[Case], tp: int, pp: int, folder: Path) -> dict[str, float]:
    """Return, for each case, the norm of the difference between what ranks compute and one alone, over the latter's."""
    computed, errors = compute_all(cases, tp, pp, folder), {}
    for case in cases:
        expected = compute(case, ONE_RANK, "")
        assert computed[case.name].shape == expected.shape
        assert expected.std() > 0.3  # or the comparison would mean nothing
        if case.config.get("dtype") == "float32" or not case.config:
            assert (computed[case.name] - expected).abs().max() < 1e-4, case.name
        errors[case.name] = float((computed[case.name] - expected).norm() / expected.norm())
    return errors


def test_two_ranks_compute_what_one_computes(models: dict[str, Case], adapted: dict[str, Case], tmp_path: Path) -> None:
    error_of_ranks([*models.values(), *adapted.values()], 2, 1, tmp_path)


def test_four_ranks_share_heads_of_keys_and_values(models: dict[str, Case], tmp_path: Path) -> None:
    names = ("llama, tied", "mixtral", "gemma3", "gpt2")
    error_of_ranks([models[name] for name in names], 4, 1, tmp_path)


def test_stages_of_two_ranks(models: dict[str, Case], adapted: dict[str, Case], tmp_path: Path) -> None:
    names = ("llama, tied", "qwen3_moe", "gemma3", "opt, 350m's shape")
    error_of_ranks([*(models[name] for name in names), adapted["llama"]], 2, 2, tmp_path)


def test_stages_of_one_rank(models: dict[str, Case], tmp_path: Path) -> None:
    error_of_ranks([models[name] for name in ("llama", "opt", "qwen3")], 1, 3, tmp_path)


def test_two_ranks_have_slices_of_quantised_weights(tmp_path: Path) -> None:
    """In float32, slices hold the same numbers. Otherwise matmuls round activations, each rank its own."""
    plain = save(llama(**WIDE, attention_bias=True), tmp_path / "plain")
    folders = {name: save_packed(llama(**WIDE), tmp_path / name, scheme) for name, scheme in PACKED.items()}
    folders["gpt2, gptq"] = save_packed(gpt2(n_embd=64, n_head=4), tmp_path / "gpt2", Scheme())
    for name, (model, types) in {
        "gguf": (llama(**WIDE), gguf_type),
        "gguf, parts of groups": (llama(**WIDE | {"intermediate_size": 96}), gguf_type),
        "gguf, gpt2": (gpt2(n_embd=64, n_head=4), gguf_type),
        "gguf, Q4_K_M": (llama(**WIDER), q4_k_m),
    }.items():
        folders[name] = model_folder(write(model, tmp_path / f"{name}.gguf", types), tmp_path / "cache")
    cases = [Case(f"{name}, exact", folder, {"dtype": "float32"}) for name, folder in folders.items()]
    if extension.load():
        del folders["gguf, parts of groups"]
        cases += [Case(name, folder, {"quantization": "auto"}) for name, folder in folders.items()]
        cases += [Case(name, plain, {"quantization": name}) for name in ("int8", "int4")]
    cases += [Case("int8 cache", plain, {"kv_cache_dtype": "int8"})]
    errors = error_of_ranks(cases, 2, 1, tmp_path)

    assert all(error < 0.3 for error in errors.values()), errors  # a wrong slice would give 1

"""Compares GPTQ, AWQ and SqueezeLLM checkpoints, quantised and dequantised, with transformers on the same weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.cpu import extension
from kernels.load import ops, reference
from kernels.quantized import QuantizedWeight, StackedWeight
from kernels.table_weight import TableWeight
from services.worker.config import WorkerConfig
from services.worker.models.load import load_model
from shared.errors import ConfigError, ModelError
from tests.models.fallback_models import stablelm
from tests.models.family_variants import gpt2, phi3, qwen2
from tests.models.gptq_awq_writer import Scheme
from tests.models.quantized_checkpoints import (
    CPU,
    TOKENS,
    WIDE,
    Q,
    assert_rounded,
    logits,
    save_quantized,
    weight_files,
)
from tests.models.squeezellm_writer import TableScheme
from tests.models.tiny_models import llama, opt, reference_logits

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(**WIDE),
    "qwen2": lambda: qwen2(**WIDE),
    "phi3": lambda: phi3(**WIDE),
    "opt": lambda: opt(hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_attention_heads=4),
    "gpt2": lambda: gpt2(n_embd=64, n_head=4),
}
SCHEMES: dict[str, Scheme | TableScheme] = {
    "gptq, symmetric": Scheme(),
    "gptq, zeros": Scheme(symmetric=False, group_size=64),
    "gptq, zeros as they are": Scheme(symmetric=False, layout="gptq_v2", group_size=-1),
    "gptq, 8 bits": Scheme(bits=8),
    "gptq, 8 bits, zeros": Scheme(bits=8, symmetric=False, group_size=-1, layout="gptq_v2"),
    "gptq, order of activations": Scheme(act_order=True),
    "gptq, order of activations, zeros": Scheme(act_order=True, symmetric=False, group_size=64),
    "gptq, g_idx of zeros": Scheme(symmetric=False, g_idx="zeros"),
    "gptq, 8 bits, g_idx of zeros": Scheme(bits=8, g_idx="zeros"),
    "gptq, no g_idx": Scheme(symmetric=False, g_idx="absent"),
    "awq": Scheme(method="awq", symmetric=False),
    "awq, one group": Scheme(method="awq", symmetric=False, group_size=-1),
    "squeezellm": TableScheme(),
    "squeezellm, outliers": TableScheme(outliers=0.02),
    "squeezellm, whole rows": TableScheme(outliers=0.02, full_rows=3, tables=torch.float32),
}
METHODS = {
    "gptq": Scheme(symmetric=False),
    "awq": Scheme(method="awq", symmetric=False),
    "squeezellm": TableScheme(outliers=0.02),
}
CASES = [("llama", scheme) for scheme in SCHEMES] + [
    (name, scheme)
    for name in ("phi3", "opt", "gpt2")
    for scheme in ("gptq, zeros", "awq", "squeezellm", "squeezellm, whole rows")
]
CASES += [("qwen2", "squeezellm"), ("qwen2", "squeezellm, whole rows")]


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_logits_are_those_of_transformers(
    name: str, scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LDG-06: with and without an order of activations, in groups of 32 and one group; and tables with outliers.

    Some families join these matrices, and some transpose them.
    """
    model = MODELS[name]()
    folder = save_quantized(model, tmp_path, SCHEMES[scheme])
    theirs = reference_logits(model, TOKENS)
    assert theirs.std() > 0.3  # or the comparison would mean nothing
    ours, forward = logits(folder, dtype="float32")
    assert forward.precision.name == "float32"
    assert (ours - theirs).abs().max() < 1e-4
    if extension.load():
        ours, forward = logits(folder)
        assert forward.precision.name == scheme.partition(",")[0]
        assert_rounded(ours, theirs)
    assert not caplog.records


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quants_stand_for_the_same_numbers(scheme: str, tmp_path: Path) -> None:
    """LDG-07, LDG-26: zero points of all sizes, in both layouts of GPTQ; and codes, with and without outliers."""
    model = MODELS["llama"]()
    files = weight_files(save_quantized(model, tmp_path, SCHEMES[scheme]))
    assert set(files.names) == set(model.state_dict())
    for name, weight in model.state_dict().items():
        assert torch.equal(files.get(name), weight)
        quantized = files.get_quantized(name)
        assert files.is_quantized(name) is (quantized is not None)
        if quantized is not None:
            error = (quantized.dequantize() - weight).abs()
            assert (error <= _tolerance(quantized, SCHEMES[scheme])).all()
    assert files.is_quantized(f"{Q}.weight")
    assert not files.is_quantized("lm_head.weight")


def _tolerance(quantized: QuantizedWeight | StackedWeight | TableWeight, scheme: Scheme | TableScheme) -> Tensor:
    """Return how much a weight may be off: mins are rounded, where zero points differ."""
    if isinstance(scheme, TableScheme) or scheme.symmetric:
        return torch.zeros(1)
    assert isinstance(quantized, QuantizedWeight)
    assert quantized.bits == scheme.bits
    unpacked = quantized.unpacked()
    scales = unpacked._replace(quants=torch.ones_like(unpacked.quants), mins=None, zero_point=0).dequantize()
    return scales * 2**quantized.bits * 2.0**-11


@pytest.mark.parametrize("method", METHODS)
def test_without_kernels_for_it_it_is_dequantised_and_it_is_said(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_quantized(MODELS["llama"](), tmp_path, METHODS[method])
    assert load_model(folder, WorkerConfig(device="cpu"), CPU, reference()).precision.name == "float32"
    assert "needs the kernels compiled for this CPU" in caplog.text
    with pytest.raises(ConfigError, match=f"--quantization {method} needs the kernels compiled for this CPU"):
        load_model(folder, WorkerConfig(device="cpu", quantization=method), CPU, reference())
    other = next(one for one in METHODS if one != method)
    with pytest.raises(ConfigError, match=f"--quantization {other}: the model is not a checkpoint whose"):
        load_model(folder, WorkerConfig(device="cpu", quantization=other), CPU, ops(CPU))


@pytest.mark.parametrize("method", METHODS)
def test_transformers_code_computes_it_dequantised(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = stablelm(hidden_size=64, intermediate_size=128, num_attention_heads=4)
    folder = save_quantized(model, tmp_path, METHODS[method])
    ours, forward = logits(folder)
    assert forward.precision.name == "float32"
    assert (ours - reference_logits(model, TOKENS)).abs().max() < 1e-4
    assert "are dequantised: to compute with them as they are needs a family" in caplog.text


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_of_floats_that_says_otherwise_is_refused(method: str, tmp_path: Path) -> None:
    folder = save_quantized(MODELS["llama"](), tmp_path, METHODS[method], plain=lambda name: True)
    with pytest.raises(
        ModelError, match=rf"config\.json says {method}, but the weight files have no tensor with quants"
    ):
        load_model(folder, WorkerConfig(device="cpu"), CPU, ops(CPU))

"""Tests transformers' code with Quire's attention; test_model_families.py compares it with transformers alone."""

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from kernels.load import ops
from services.worker.models.fallback.linear import pack_modules
from services.worker.models.fallback.model import TransformersModel
from tests.models.fallback_models import MODELS
from tests.models.tiny_models import Forward, llama, opt, reference_logits, save

TOKENS = torch.randint(3, 263, (41,), generator=torch.Generator().manual_seed(1)).tolist()
SCATTERED = [17, 3, 40, 8, 63, 0, 22, 5, 31, 12, 50]

OPS = ops(torch.device("cpu"))


@pytest.mark.parametrize("form", ["shards", "bin", "a lone file"])
def test_weights_come_in_any_form(form: str, tmp_path: Path) -> None:
    model = MODELS["olmo2"]()
    save(model, tmp_path, max_shard_size="40KB" if form == "shards" else "1GB")
    whole = tmp_path / "model.safetensors"
    if form == "shards":
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    elif form == "bin":
        torch.save(load_file(whole), tmp_path / "pytorch_model.bin")
        whole.unlink()
    else:
        whole.rename(tmp_path / "weights.safetensors")
    forward = Forward(tmp_path)
    forward.enter(0, TOKENS, SCATTERED)
    (ours,) = forward.step((0, 0, len(TOKENS)))
    assert (ours - reference_logits(model, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize("make", [llama, opt])
def test_a_family_can_be_passed_over(make: type[PreTrainedModel], tmp_path: Path) -> None:
    model = make()
    save(model, tmp_path)
    tokens = [token % 131 for token in TOKENS]
    logits = []
    for implementation in ("quire", "transformers"):
        forward = Forward(tmp_path, model_impl=implementation)
        assert isinstance(forward.decoder, TransformersModel) == (implementation == "transformers")
        forward.enter(0, tokens, SCATTERED)
        (ours,) = forward.step((0, 0, len(tokens)))
        assert (ours - reference_logits(model, tokens)).abs().max() < 1e-4
        logits.append(ours)
    assert (logits[0] - logits[1]).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near(dtype: str, tmp_path: Path) -> None:
    model = MODELS["granite"]()
    forward = Forward(save(model, tmp_path), dtype=dtype)
    forward.enter(0, TOKENS, SCATTERED)
    (ours,) = forward.step((0, 0, 41))
    theirs = reference_logits(model, TOKENS)
    assert ours.dtype == torch.float32
    assert ((ours - theirs).norm() / theirs.norm()) < (0.15 if dtype == "bfloat16" else 0.02)


def test_weights_are_dropped_as_they_are_packed() -> None:
    """Otherwise a model would be in memory twice while it loads."""
    model = MODELS["olmo2"]()
    plain = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)]
    alive: list[int] = []

    def pack_linear(weight: torch.Tensor) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in plain))
        return OPS.pack_linear(weight)

    pack_modules(model, SimpleNamespace(pack_linear=pack_linear))
    assert alive == list(range(len(plain), 0, -1))
    assert not any(reference() is not None for reference in plain)


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    save(MODELS["olmo2"](), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    logits = []
    for _ in range(2):
        forward = Forward(tmp_path, load_format="dummy", dtype="float32")
        forward.enter(0, TOKENS, SCATTERED)
        logits += forward.step((0, 0, 41))
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)

"""Compares families, and models that transformers' code computes, with transformers in float32, and with themselves in
other batches, chunks and block tables.
"""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.worker.models.fallback.model import TransformersModel
from tests.models import fallback_models
from tests.models.family_variants import VARIANTS
from tests.models.tiny_models import Forward, reference_logits, save

Pair = tuple[PreTrainedModel, Path]

FALLBACK = {f"transformers' {name}": make for name, make in fallback_models.MODELS.items()}
MADE: dict[str, PreTrainedModel] = {}


def variant(name: str) -> PreTrainedModel:
    if name not in MADE:
        MADE[name] = VARIANTS[name]()
    return MADE[name]


TOKENS = torch.randint(3, 131, (41,), generator=torch.Generator().manual_seed(1)).tolist()
SCATTERED = [17, 3, 40, 8, 63, 0, 22, 5, 31, 12, 50]


@pytest.fixture(scope="module", params=[*VARIANTS, *FALLBACK])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name = request.param
    model = FALLBACK[name]() if name in FALLBACK else variant(name)
    return model, save(model, tmp_path_factory.mktemp("model"))


def test_logits_equal_those_of_transformers(pair: Pair, request: pytest.FixtureRequest) -> None:
    model, folder = pair
    forward = Forward(folder)
    assert isinstance(forward.decoder, TransformersModel) is (request.node.callspec.params["pair"] in FALLBACK)
    forward.enter(2, TOKENS, SCATTERED)
    (ours,) = forward.step((2, 0, len(TOKENS)))
    theirs = reference_logits(model, TOKENS)
    assert theirs.std() > 0.3  # or the comparison would mean nothing
    assert (ours - theirs).abs().max() < 1e-4


def test_chunks_make_no_difference(pair: Pair) -> None:
    _, folder = pair
    forward = Forward(folder)
    forward.enter(0, TOKENS, SCATTERED)
    (whole,) = forward.step((0, 0, 41))
    for counts in ([1] * 41, [17, 1, 22, 1], [40, 1]):
        forward.storage.zero_()
        parts, start = [], 0
        for count in counts:
            parts += forward.step((0, start, count))
            start += count
        assert (torch.cat(parts) - whole).abs().max() < 1e-5 * whole.abs().max()


def test_neighbours_make_no_difference(pair: Pair) -> None:
    model, folder = pair
    forward = Forward(folder)
    texts = [TOKENS[:30], TOKENS[5:], TOKENS[::-1], TOKENS[7:8]]
    for slot, tokens in enumerate(texts):
        forward.enter(slot, tokens, range(slot * 16, slot * 16 + 12))
    forward.step((0, 0, 29), (1, 0, 10), (2, 0, 3))
    first, second, third, fourth = forward.step((2, 3, 38), (0, 29, 1), (3, 0, 1), (1, 10, 26))
    for ours, tokens in ((first, texts[2]), (second, texts[0]), (third, texts[3]), (fourth, texts[1])):
        assert (ours - reference_logits(model, tokens)[-len(ours) :]).abs().max() < 1e-4


def test_random_weights_have_the_shapes(pair: Pair) -> None:
    model, folder = pair
    forward = Forward(folder, load_format="dummy", dtype="float32")
    forward.enter(0, TOKENS, SCATTERED)
    (ours,) = forward.step((0, 0, 41))
    assert ours.shape == (41, model.config.vocab_size)
    assert ours.isfinite().all()
    assert ours.std() > 0


def test_a_shared_prefix_is_read_from_the_same_blocks(tmp_path: Path) -> None:
    model = variant("llama")
    forward = Forward(save(model, tmp_path))
    prefix, tails = TOKENS[:16], ([9, 8, 7], [4, 5, 6, 7, 8])
    forward.enter(0, prefix + tails[0], [30, 31, 32, 33, 7])
    forward.enter(1, prefix + tails[1], [30, 31, 32, 33, 9, 10])
    forward.step((0, 0, 19))
    (ours,) = forward.step((1, 16, 5))
    assert (ours - reference_logits(model, prefix + tails[1])[16:]).abs().max() < 1e-4


def test_a_copied_block_is_as_good(tmp_path: Path) -> None:
    model = variant("llama")
    forward = Forward(save(model, tmp_path))
    forward.enter(0, TOKENS[:10], [3, 4, 5])
    forward.step((0, 0, 10))
    forward.ops.copy_blocks(forward.storage, torch.tensor([5]), torch.tensor([20]))
    forward.enter(1, [*TOKENS[:10], 77], [3, 4, 20])
    forward.enter(0, [*TOKENS[:10], 55], [3, 4, 5])
    ours = forward.step((1, 10, 1), (0, 10, 1))
    for logits, last in zip(ours, (77, 55), strict=True):
        assert (logits - reference_logits(model, [*TOKENS[:10], last])[10:]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "opt, 350m's shape", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near(name: str, dtype: str, tmp_path: Path) -> None:
    model = variant(name)
    forward = Forward(save(model, tmp_path), dtype=dtype)
    forward.enter(0, TOKENS, SCATTERED)
    (ours,) = forward.step((0, 0, 41))
    theirs = reference_logits(model, TOKENS)
    assert ours.dtype == torch.float32
    bound = 0.15 if dtype == "bfloat16" else 0.02
    assert ((ours - theirs).norm() / theirs.norm()) < bound

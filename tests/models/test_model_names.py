"""Tests the names of tensors in checkpoints: Quire loads what transformers loads, with the same logits."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel, SiglipVisionConfig

from kernels.cpu import extension
from kernels.load import ops
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.config import WorkerConfig
from services.worker.models.decoder.decoder import Decoder
from services.worker.models.fallback.model import TransformersModel
from services.worker.models.load import load_model, match_family
from services.worker.models.registry import read_supported
from shared.errors import ModelError
from tests.models.family_variants import gemma, gemma2, gemma3, gpt2, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from tests.models.tiny_models import (
    LLAMA,
    Forward,
    llama,
    opt,
    quire_logits,
    randomize_constants,
    rewrite_weights,
    save,
    set_config,
    transformers_logits,
)

TOKENS = [5, 9, 100, 3, 77, 12, 44, 2, 90, 17, 23]
FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    make.__name__: make
    for make in (llama, opt, gpt2, mistral, mixtral, phi3, gemma, gemma2, gemma3, qwen2, qwen3, qwen3_moe)
}
TABLES = {"opt": "model.decoder.embed_tokens.weight", "gpt2": "transformer.wte.weight"}
HEAD = "lm_head.weight"

Tensors = dict[str, Tensor]


def assert_as_transformers(folder: Path, decoder: type = Decoder) -> None:
    theirs = transformers_logits(folder, TOKENS)
    assert theirs.std() > 0.3  # or the comparison would mean nothing
    forward = Forward(folder)
    assert isinstance(forward.decoder, decoder)
    forward.enter(0, TOKENS, [2, 0, 1])
    assert (forward.step((0, 0, len(TOKENS)))[0] - theirs).abs().max() < 1e-4


def without(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


# tied models


@pytest.fixture(scope="module", params=FAMILIES)
def tied(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, str, str]:
    """Return a tied model, the name of its token table, and its prefix."""
    table = TABLES.get(request.param, "model.embed_tokens.weight")
    return FAMILIES[request.param](tie_word_embeddings=True), table, table.partition(".")[0] + "."


@pytest.mark.parametrize(
    ("kept", "prefixed"), [("table", False), ("head", True), ("head", False), ("both", True), ("two", True)]
)
def test_a_tied_table_has_either_name(
    tied: tuple[PreTrainedModel, str, str], kept: str, prefixed: bool, tmp_path: Path
) -> None:
    """LDG-01, LDG-21: the head's name alone is enough; if two tables differ, both are used, as transformers does."""
    model, table, prefix = tied
    head = prefix + HEAD if prefixed else HEAD

    def change(tensors: Tensors) -> Tensors:
        if kept == "head":
            tensors[head] = tensors.pop(table)
        elif kept != "table":
            same = tensors[table]
            tensors[head] = same.clone() if kept == "both" else torch.randn(same.shape)
        return tensors if prefixed else without(prefix, tensors)

    rewrite_weights(save(model, tmp_path), change)
    assert_as_transformers(tmp_path)


def test_a_tied_head_of_another_shape_is_named(tmp_path: Path) -> None:
    rewrite_weights(
        save(llama(tie_word_embeddings=True), tmp_path), lambda tensors: tensors | {HEAD: torch.ones(7, 60)}
    )
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[7, 60\], and config\.json says \[131, 60\]"):
        quire_logits(tmp_path, TOKENS)


def test_a_tied_head_of_integers_is_named(tmp_path: Path) -> None:
    """LDG-21: its values cannot be compared with the table's."""
    quants = torch.ones(131, 60).to(torch.float8_e4m3fn)
    rewrite_weights(save(llama(tie_word_embeddings=True), tmp_path), lambda tensors: tensors | {HEAD: quants})
    with pytest.raises(ModelError, match=r"lm_head\.weight is of torch\.float8_e4m3fn"):
        quire_logits(tmp_path, TOKENS)


def test_a_tied_head_of_a_wider_type_may_be_the_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-21."""
    table = "model.embed_tokens.weight"
    rewrite_weights(save(llama(tie_word_embeddings=True).bfloat16(), tmp_path), lambda t: t | {HEAD: t[table].float()})
    quire_logits(tmp_path, TOKENS)
    assert not caplog.records
    rewrite_weights(tmp_path, lambda t: t | {HEAD: t[HEAD] + 1e-3})
    quire_logits(tmp_path, TOKENS)
    assert "lm_head.weight is not model.embed_tokens.weight: both are used" in caplog.text


def test_a_tied_model_without_either_is_refused(tmp_path: Path) -> None:
    rewrite_weights(save(llama(tie_word_embeddings=True), tmp_path), lambda t: {n: t[n] for n in t if "embed" not in n})
    with pytest.raises(ModelError, match=r"tensor model\.embed_tokens\.weight is missing$"):
        quire_logits(tmp_path, TOKENS)


# prefixes


def test_a_body_saved_alone(tied: tuple[PreTrainedModel, str, str], tmp_path: Path) -> None:
    """LDG-21, LDG-22: config.json then names the body's class, and transformers decides by `model_type`."""
    save(tied[0].base_model, tmp_path)
    assert_as_transformers(tmp_path)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "gemma2"])
def test_each_tensor_has_its_own_prefix(family: str, tmp_path: Path) -> None:
    """LDG-21: transformers looks at each name by itself."""
    table = TABLES.get(family, "model.embed_tokens.weight")
    prefix = table.partition(".")[0] + "."

    def change(tensors: Tensors) -> Tensors:
        return {(n.removeprefix(prefix) if len(n) % 2 else n): tensor for n, tensor in tensors.items()}

    rewrite_weights(save(FAMILIES[family](), tmp_path), change)
    assert_as_transformers(tmp_path)


IMAGES = {
    "as published": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "as of today": {},
    "doubled": {"model.language_model.": "model.language_model.model."},
    "short": {"model.language_model.": "language_model."},
}


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("spelling", IMAGES.values(), ids=IMAGES.keys())
def test_the_text_model_among_images_has_many_names(spelling: dict[str, str], tie: bool, tmp_path: Path) -> None:
    """LDG-21: the field of the whole model says whether it is tied."""
    shape = {"head_dim": 14, "query_pre_attn_scalar": 9, "sliding_window": 4, "sliding_window_pattern": 2}
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
    ).to_dict()
    text = LLAMA | shape | {"tie_word_embeddings": not tie}
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=tie, initializer_range=0.3
    )
    save(randomize_constants(Gemma3ForConditionalGeneration(config)), tmp_path, save_original_format=False)

    def change(tensors: Tensors) -> Tensors:
        for new, old in spelling.items():
            tensors = {re.sub(f"^{re.escape(new)}", old, name): tensor for name, tensor in tensors.items()}
        return tensors

    rewrite_weights(tmp_path, change)
    assert_as_transformers(tmp_path)


# experts in one tensor


def apart(names: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    """Return the tensors with a gate and an up tensor for each expert of layer 1."""

    def change(tensors: Tensors) -> Tensors:
        start = "model.layers.1.mlp.experts."
        for expert, both in enumerate(tensors.pop(f"{start}gate_up_proj")):
            for name, part in zip(names, both.chunk(2), strict=True):
                tensors[f"{start}{expert}.{name}.weight"] = part
        return tensors

    return change


def old_module(tensors: Tensors) -> Tensors:
    return {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}


EXPERTS: dict[str, tuple[Callable[..., PreTrainedModel], Callable[[Tensors], Tensors]]] = {
    "mixtral": (mixtral, dict),
    "mixtral, no prefix": (mixtral, lambda tensors: without("model.", tensors)),
    "mixtral, older module": (mixtral, old_module),
    "mixtral, one layer apart": (mixtral, apart(("w1", "w3"))),
    "mixtral, one expert": (lambda: mixtral(num_local_experts=1, num_experts_per_tok=1), dict),
    "qwen3_moe": (qwen3_moe, dict),
    "qwen3_moe, no prefix": (qwen3_moe, lambda tensors: without("model.", tensors)),
    "qwen3_moe, one layer apart": (qwen3_moe, apart(("gate_proj", "up_proj"))),
    "qwen3_moe, some dense": (lambda: qwen3_moe(mlp_only_layers=[0]), dict),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_in_one_tensor(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-23: transformers keeps them so in memory, and saves them so if asked to, or if it has loaded them so."""
    make, change = EXPERTS[name]
    save(make(), tmp_path, save_original_format=False)
    assert any(tensor.endswith("experts.gate_up_proj") for tensor in WeightFiles(ModelFolder.read(tmp_path)).names)
    rewrite_weights(tmp_path, change)
    assert_as_transformers(tmp_path)
    assert not caplog.records


def test_experts_of_their_own_under_the_newer_module(tmp_path: Path) -> None:
    """LDG-23."""
    rewrite_weights(
        save(mixtral(), tmp_path), lambda t: {name.replace("block_sparse_moe", "mlp"): t[name] for name in t}
    )
    assert_as_transformers(tmp_path)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
@pytest.mark.parametrize("form", ["shards", "bin"])
def test_experts_in_one_tensor_in_any_file(make: Callable[[], PreTrainedModel], form: str, tmp_path: Path) -> None:
    """LDG-23."""
    model = make()
    save(model, tmp_path, save_original_format=False, max_shard_size="60KB" if form == "shards" else "1GB")
    expected = transformers_logits(tmp_path, TOKENS)
    if form == "bin":
        files = WeightFiles(ModelFolder.read(tmp_path))
        torch.save({name: files.get(name).clone() for name in files.names}, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    assert (quire_logits(tmp_path, TOKENS) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_experts_in_one_tensor(
    make: Callable[..., PreTrainedModel], quantization: str, tmp_path: Path
) -> None:
    """LDG-23: they give the same values as separate tensors."""
    if not extension.load():
        pytest.skip("the kernels are not compiled here")
    model = make(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, head_dim=16)
    apart, together = (save(model, tmp_path / str(old), save_original_format=old) for old in (True, False))
    assert torch.equal(*(quire_logits(folder, TOKENS, quantization=quantization) for folder in (apart, together)))


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_a_wrong_tensor_of_all_experts_is_named(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    """LDG-23."""
    save(make(), tmp_path, save_original_format=False)
    name = "model.layers.1.mlp.experts.down_proj"
    whole = WeightFiles(ModelFolder.read(tmp_path)).shape(name)
    rewrite_weights(tmp_path, lambda tensors: tensors | {name: tensors[name][1:]})
    expected = f"{name} has shape {[whole[0] - 1, *whole[1:]]}, and config.json says {list(whole)}"
    with pytest.raises(ModelError, match=re.escape(expected)):
        quire_logits(tmp_path, TOKENS)
    rewrite_weights(tmp_path, lambda tensors: {other: tensors[other] for other in tensors if other != name})
    with pytest.raises(ModelError, match=re.escape(f"tensor {name} is missing") + "$"):
        quire_logits(tmp_path, TOKENS)


# names that a family lacks


def doubled(tensors: Tensors) -> Tensors:
    return {f"model.{name}" if name.startswith("model.") else name: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("make", [llama, qwen3_moe])
def test_transformers_is_tried_for_names_that_a_family_does_not_know(
    make: Callable[[], PreTrainedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LDG-23: it accepts one more prefix; a log line says whose code serves the model."""
    rewrite_weights(save(make(), tmp_path), doubled)
    assert_as_transformers(tmp_path, TransformersModel)
    said = [record.getMessage() for record in caplog.records]
    assert re.match(r"tensor model\.embed_tokens\.weight is missing .*: \w+ is loaded by transformers' code", said[0])
    assert len(set(said)) == 1
    folder, by_name = read_supported(tmp_path)
    implementation, _ = match_family(folder.config, by_name, "auto", WeightFiles(folder))
    assert (implementation.native, implementation.reason) == (False, said[0].partition(": ")[0])


def test_a_family_that_was_asked_for_refuses_them(tmp_path: Path) -> None:
    """LDG-23."""
    rewrite_weights(save(llama(), tmp_path), doubled)
    with pytest.raises(ModelError, match=r"tensor model\.embed_tokens\.weight is missing"):
        quire_logits(tmp_path, TOKENS, model_impl="quire")


@pytest.mark.parametrize("layers", [4, 60000])
def test_what_is_nowhere_is_not_looked_for(layers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-23: transformers is not tried if the checkpoint has no numbers for what is missing."""
    rewrite_weights(save(llama(), tmp_path), lambda tensors: tensors | {"extra": torch.ones(3)})
    set_config(tmp_path, num_hidden_layers=layers)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.3\.\S+ is missing \(and (8|many) more\)$"):
        load_model(tmp_path, WorkerConfig(device="cpu"), torch.device("cpu"), ops(torch.device("cpu")))
    assert not caplog.records


def test_where_neither_can_both_reasons_are_said(tmp_path: Path) -> None:
    """LDG-23."""
    rewrite_weights(
        save(llama(), tmp_path), lambda t: {name.replace("mlp", "ffn"): tensor for name, tensor in t.items()}
    )
    with pytest.raises(ModelError, match=r"mlp\.gate_proj\.weight is missing .*; .*tensor model\.layers") as caught:
        quire_logits(tmp_path, TOKENS)
    assert str(caught.value).startswith(f"{tmp_path}: ")

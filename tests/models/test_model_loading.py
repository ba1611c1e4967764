"""Tests weight files: every storage format, and every error that a folder can have."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.config import WorkerConfig
from services.worker.kv_memory import kv_memory
from services.worker.models.fingerprint import fingerprint, weights_digest
from services.worker.models.load import load_model
from services.worker.models.precision import Precision
from shared.errors import ModelError
from tests.models.fallback_models import granite
from tests.models.family_variants import VARIANTS
from tests.models.tiny_models import Forward, change_weights, llama, opt, reference_logits, save, set_config

TOKENS = [5, 9, 100, 3, 77, 12]


def logits(folder: Path, **config: Any) -> Tensor:
    forward = Forward(folder, **config)
    forward.enter(0, TOKENS, [1, 0])
    return forward.step((0, 0, len(TOKENS)))[0]


def assert_same(folder: Path, model: PreTrainedModel, **config: Any) -> None:
    assert (logits(folder, **config) - reference_logits(model, TOKENS)).abs().max() < 1e-4


def as_bin(folder: Path, **options: Any) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin", **options)
    (folder / "model.safetensors").unlink()


# every format


def test_shards(tmp_path: Path) -> None:
    model = llama()
    save(model, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(tmp_path, model)


def test_only_files_of_the_index_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-03."""
    model = llama()
    save(model, tmp_path, max_shard_size="60KB")
    others = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    for name in ("consolidated.safetensors", "weights.safetensors", "model-00001-of-00001.safetensors"):
        save_file(others, tmp_path / name)
    torch.save(others, tmp_path / "pytorch_model.bin")
    assert_same(tmp_path, model)
    assert not caplog.records


def as_shards(folder: Path, form: str) -> None:
    """Move a model's single file into three shards and an index."""
    ending = {"safetensors": "safetensors", "pt": "bin"}[form]
    single = folder / {"safetensors": "model.safetensors", "pt": "pytorch_model.bin"}[form]
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"{single.stem}-{number % 3}.{ending}" for number, name in enumerate(tensors)}
    for shard in set(where.values()):
        part = {name: tensors[name] for name in tensors if where[name] == shard}
        save_file(part, folder / shard) if form == "safetensors" else torch.save(part, folder / shard)
    (folder / f"{single.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("index", ["whole", "of shards that are gone", "unreadable"])
@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_an_index_beside_a_single_file(form: str, index: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-27: Quire loads the single file, as transformers does, and a log line names both."""
    save(llama(seed=1), tmp_path)
    as_shards(tmp_path, form)
    model = llama()
    save(model, tmp_path / "newer")
    if form == "pt":
        as_bin(tmp_path / "newer")
    single = next(path for path in (tmp_path / "newer").iterdir() if path.suffix in (".safetensors", ".bin"))
    single.rename(tmp_path / single.name)
    if index == "of shards that are gone":
        next(tmp_path.glob("*-1.*")).unlink()
    if index == "unreadable":
        (tmp_path / f"{single.name}.index.json").write_text('{"weight_map": 5}')
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, use_safetensors=form == "safetensors").eval()
    assert_same(tmp_path, theirs)
    assert_same(tmp_path, model)
    said = {record.getMessage() for record in caplog.records if record.levelno == logging.WARNING}
    assert said == {
        f"{tmp_path}: {single.name} is served and {single.name}.index.json, which lists other files, is not: "
        "one of the two is a leftover"
    }


@pytest.mark.parametrize("shards", [1, 2])
def test_an_index_of_the_single_file_is_no_other(shards: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    where = {name: ("model", "rest")[number % shards] + ".safetensors" for number, name in enumerate(tensors)}
    for shard in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_same(tmp_path, model)
    assert not caplog.records


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older than torch 1.6"])
def test_pytorch_file(tmp_path: Path, zipped: bool) -> None:
    model = opt()
    save(model, tmp_path)
    as_bin(tmp_path, _use_new_zipfile_serialization=zipped)
    assert_same(tmp_path, model)


def test_pytorch_shards(tmp_path: Path) -> None:
    model = llama()
    save(model, tmp_path)
    as_shards(tmp_path, "pt")
    assert_same(tmp_path, model)


def test_format_by_wish(tmp_path: Path) -> None:
    model = llama()
    save(model, tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert_same(tmp_path, model, load_format="safetensors")
    with pytest.raises(ModelError, match="hold no tensors"):
        logits(tmp_path, load_format="pt")


def test_older_names_of_opt(tmp_path: Path) -> None:
    model = opt()
    save(model, tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change_weights(tmp_path, rename)
    assert_same(tmp_path, model)


def test_a_lone_file_under_another_name(tmp_path: Path) -> None:
    model = llama()
    save(model, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert_same(tmp_path, model)
    shutil.copy(tmp_path / "weights.safetensors", tmp_path / "others.safetensors")
    with pytest.raises(ModelError, match="no weights"):
        logits(tmp_path)
    for name in ("weights.safetensors", "others.safetensors"):
        (tmp_path / name).unlink()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert_same(tmp_path, model)
    shutil.copy(tmp_path / "weights.pt", tmp_path / "optimizer.pt")
    with pytest.raises(ModelError, match="no weights"):
        logits(tmp_path)


def test_a_model_without_its_prefix(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    save(model, tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change_weights(tmp_path, rename)
    assert_same(tmp_path, model)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_conversion_while_loading(tmp_path: Path, stored: torch.dtype) -> None:
    save(llama().to(stored), tmp_path)
    assert_same(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    assert Forward(tmp_path).dtype == torch.float32


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, second = logits(tmp_path, load_format="dummy"), logits(tmp_path, load_format="dummy")
    assert first.isfinite().all()
    assert torch.equal(first, second)


# heads


def test_untied_without_a_head_is_refused(tmp_path: Path) -> None:
    """LDG-02."""
    save(llama(tie_word_embeddings=True), tmp_path)
    set_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is missing$"):
        logits(tmp_path)


# broken folders


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    """LDG-02."""
    save(llama(), tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        logits(tmp_path)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    """LDG-02."""
    save(llama(), tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(59)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[59\], and config\.json says \[60\]"):
        logits(tmp_path)


@pytest.mark.parametrize(
    ("variant", "tensor", "shape"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w1.weight", [77, 60]),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.4.w2.weight", [60, 77]),
        ("mixtral", "model.layers.2.block_sparse_moe.gate.weight", [5, 60]),
        ("qwen3_moe", "model.layers.2.mlp.experts.5.up_proj.weight", [31, 60]),
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight", [100, 60]),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight", [154, 60]),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", [60, 180]),
        ("gpt2", "transformer.h.1.attn.c_attn.bias", [180]),
        ("gpt2", "transformer.h.2.mlp.c_proj.weight", [240, 60]),
        ("gemma3", "model.layers.1.self_attn.k_norm.weight", [14]),
    ],
)
def test_a_wrong_tensor_of_any_kind_is_named(tmp_path: Path, variant: str, tensor: str, shape: list[int]) -> None:
    save(VARIANTS[variant](), tmp_path)
    wrong = [shape[0] + 1, *shape[1:]]
    change_weights(tmp_path, lambda tensors: tensors.update({tensor: torch.ones(wrong)}))
    with pytest.raises(ModelError, match=re.escape(f"{tensor} has shape {wrong}, and config.json says {shape}")):
        logits(tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.pop(tensor))
    with pytest.raises(ModelError, match=re.escape(f"tensor {tensor} is missing")):
        logits(tmp_path)


def test_gpt2_as_it_was_first_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its names have no prefix, and the attention masks are among the tensors."""
    model = VARIANTS["gpt2"]()
    save(model, tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128)
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    change_weights(tmp_path, rename)
    assert_same(tmp_path, model)
    assert not caplog.records


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(60, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is of torch\.int8"):
        logits(tmp_path)
    set_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match="quantization_config"):
        logits(tmp_path)


def test_extra_tensors_give_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-02."""
    model = llama()
    save(model, tmp_path)
    extra = {f"extra.{number}": torch.ones(1) for number in range(7)}
    change_weights(
        tmp_path, lambda t: t.update(extra | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)})
    )
    with caplog.at_level(logging.WARNING):
        assert_same(tmp_path, model)
    assert len(caplog.records) == 1
    assert "extra.0" in caplog.text
    assert "and 2 more" in caplog.text
    assert "inv_freq" not in caplog.text


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    """LDG-02."""
    save(llama(), tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        logits(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.99])
@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_a_truncated_file_is_named(tmp_path: Path, form: str, keep: float) -> None:
    """LDG-02."""
    save(llama(), tmp_path)
    if form == "pt":
        as_bin(tmp_path)
    path = tmp_path / ("model.safetensors" if form == "safetensors" else "pytorch_model.bin")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    with pytest.raises(ModelError, match=path.name):
        logits(tmp_path)


class Sneaky:
    """An object that pickles as a function call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (shutil.rmtree, ("/nonexistent-quire-test",))


def test_code_in_a_pickle_does_not_run(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Sneaky()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read"):
        logits(tmp_path)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        logits(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        logits(tmp_path)
    save(llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights.*model\.safetensors"):
        logits(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 5}')
    with pytest.raises(ModelError, match=r"index\.json"):
        logits(tmp_path)


# configs


@pytest.mark.parametrize("make", [llama, granite])
@pytest.mark.parametrize("named", [None, [], "absent", "string"])
def test_an_architecture_need_not_be_named(
    make: Callable[[], PreTrainedModel], named: list[str] | str | None, tmp_path: Path
) -> None:
    """LDG-22: `model_type` is enough, with a family or without."""
    model = make()
    save(model, tmp_path)
    change = {"string": {"architectures": type(model).__name__}, "absent": {}}
    absent = ("architectures",) if named == "absent" else ()
    set_config(tmp_path, *absent, **(change[named] if isinstance(named, str) else {"architectures": named}))
    assert_same(tmp_path, model)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "nonsense"}, "hidden_act 'nonsense'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    save(llama(), tmp_path)
    set_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=named):
        logits(tmp_path)


def test_old_opt_without_a_final_norm(tmp_path: Path) -> None:
    model = opt(_remove_final_layer_norm=True)
    save(model, tmp_path)
    assert_same(tmp_path, model)


# the worker's model info


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    first, second = save(llama(), tmp_path / "a"), save(llama(seed=1), tmp_path / "b")
    copy = shutil.copytree(first, tmp_path / "c")
    cpu = torch.device("cpu")

    plain = Precision(torch.float32, None, torch.float32)

    def of(folder: Path, **changes: Any) -> str:
        weights = weights_digest(ModelFolder.read(folder), [folder / "model.safetensors"])
        return fingerprint(weights, plain._replace(**changes), cpu)

    assert of(first) == of(copy)
    others = [of(first, dtype=torch.bfloat16), of(first, quantization="int8"), of(first, kv_dtype=torch.bfloat16)]
    assert len({of(first), of(second), *others}) == 5


def test_memory_for_kv() -> None:
    cpu = torch.device("cpu")
    assert kv_memory(WorkerConfig(kv_cache_memory=0.25), cpu, None) == 2**28
    assert 0 < kv_memory(WorkerConfig(), cpu, None) <= 4 * 2**30


def test_a_missing_gpu_is_said(tmp_path: Path) -> None:
    from services.worker.models.load import choose_device

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ModelError, match="no GPU"):
        choose_device("cuda")


def test_types_are_by_wish(tmp_path: Path) -> None:
    from kernels.load import ops

    save(llama(), tmp_path)
    cpu = torch.device("cpu")
    for name, dtype in (("half", torch.float16), ("float", torch.float32), ("bfloat16", torch.bfloat16)):
        config = WorkerConfig(dtype=name)  # type: ignore[arg-type]
        assert load_model(tmp_path, config, cpu, ops(cpu)).precision == Precision(dtype, None, dtype)

"""Tests what each rank has of a model, and which models ranks cannot divide."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import extension
from kernels.load import ops
from kernels.quantized import FloatWeight
from services.worker.config import WorkerConfig
from services.worker.models.load import LoadedModel, load_model, match_family
from services.worker.models.parameters import RandomWeights
from services.worker.models.precision import Precision
from services.worker.models.registry import read_supported
from services.worker.models.share import Share
from services.worker.models.spec import DecoderSpec, parameter_shapes
from services.worker.models.tensor_map import concatenated_shape
from services.worker.parallel_config import ParallelConfig
from shared.errors import ConfigError, ModelError
from tests.models.fallback_models import granite
from tests.models.family_variants import mixtral
from tests.models.forward import CPU
from tests.models.gptq_awq_writer import Scheme, save_packed
from tests.models.squeezellm_writer import TableScheme, save_tables
from tests.models.tiny_models import llama, opt, save

FLOAT32 = Precision(torch.float32, None, torch.float32)
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 80}


def spec_of(path: Path) -> DecoderSpec:
    folder, implementation = read_supported(path)
    _, match = match_family(folder.config, implementation, "auto", None)
    assert match
    return match.spec


def load(folder: Path, **config: Any) -> LoadedModel:
    return load_model(folder, WorkerConfig(device="cpu", **config), CPU, ops(CPU))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("make", [llama, mixtral])
def test_ranks_together_have_every_number(make: Any, ranks: int, tmp_path: Path) -> None:
    """Each once, except keys and values of heads that several ranks have, and what all of them have whole."""
    spec = spec_of(save(make(**SIZES, attention_bias=True, num_hidden_layers=1), tmp_path))
    shares = [Share(spec, ParallelConfig(rank, ranks)) for rank in range(ranks)]
    sizes = []
    for name, parts in parameter_shapes(spec):
        counts = torch.zeros(concatenated_shape(parts))
        for share in shares:
            for region in share.regions(parts):
                counts[region] += 1
        expected = torch.ones_like(counts)
        if "norm" in name or "router" in name:
            expected *= ranks
        if "qkv" in name:
            expected[64:] = max(1, ranks // 2)
        assert torch.equal(counts, expected), name
        sizes.append([sum(counts[region].numel() for region in share.regions(parts)) for share in shares])
    for own in sizes:
        assert max(own) - min(own) <= 60 * ranks  # the last rank has fewer rows of the vocabulary


@pytest.mark.parametrize(("layers", "stages", "counts"), [(3, 2, [2, 1]), (7, 3, [3, 2, 2]), (4, 4, [1, 1, 1, 1])])
def test_stages_have_consecutive_layers(layers: int, stages: int, counts: list[int], tmp_path: Path) -> None:
    spec = spec_of(save(llama(num_hidden_layers=layers), tmp_path))
    shares = [Share(spec, ParallelConfig(rank, 1, stages)) for rank in range(stages)]
    assert [layer for share in shares for layer in share.layers] == list(range(layers))
    assert [share.spec.shape.num_layers for share in shares] == counts


@pytest.mark.parametrize("tied", [False, True])
def test_the_ends_are_on_the_first_and_the_last_stage(tied: bool, tmp_path: Path) -> None:
    spec = spec_of(save(opt(word_embed_proj_dim=24, tie_word_embeddings=tied), tmp_path))
    names = dict(parameter_shapes(spec))
    ends = [
        [name for name in Share(spec, ParallelConfig(rank, 1, 3)).parameters(names) if not name.startswith("layers.")]
        for rank in range(3)
    ]
    first, last = ["embedding.weight", "positions.weight", "project_in.weight"], ["project_out.weight"]
    last += ["final_norm.weight", "final_norm.bias"]
    assert ends == [first, [], ["embedding.weight", *last] if tied else [*last, "head.weight"]]


def test_the_shape_is_that_of_the_rank(tmp_path: Path) -> None:
    """KV memory depends on it; tokens are those of the whole model."""
    folder = save(llama(**SIZES, num_hidden_layers=3), tmp_path)
    for rank, layers in enumerate([2, 2, 1, 1]):
        config = {"rank": rank, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
        shape = load(folder, **config).model.shape
        assert (shape.num_layers, shape.num_kv_heads, shape.vocab_size) == (layers, 1, 131)


def test_ranks_have_their_part_of_one_ranks_random_weights(tmp_path: Path) -> None:
    spec = spec_of(save(llama(**SIZES, num_hidden_layers=3), tmp_path))
    whole = RandomWeights(spec, FLOAT32, CPU)
    ranks = [RandomWeights(spec, FLOAT32, CPU, ParallelConfig(rank, 2, 2)) for rank in range(4)]
    assert [("layers.2.out.weight" in weights, "embedding.weight" in weights) for weights in ranks] == [
        (False, True),
        (False, True),
        (True, False),
        (True, False),
    ]
    for name, dimension in (("layers.2.out.weight", 1), ("layers.2.down.weight", 1), ("head.weight", 0)):
        assert torch.equal(torch.cat([matrix(weights, name) for weights in ranks[2:]], dimension), matrix(whole, name))
    assert torch.equal(ranks[0].load("layers.1.mlp_norm.weight"), whole.load("layers.1.mlp_norm.weight"))
    up = matrix(whole, "layers.0.up.weight")
    assert torch.equal(matrix(ranks[1], "layers.0.up.weight"), torch.cat((up[40:80], up[120:])))


def matrix(weights: RandomWeights, name: str) -> torch.Tensor:
    weight = weights.load_matrix(name)
    assert isinstance(weight, FloatWeight)
    return weight.joined()


def test_ranks_have_the_fingerprint_of_their_group(tmp_path: Path) -> None:
    folder = save(llama(**SIZES, num_hidden_layers=2), tmp_path)
    groups = [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
    prints = [load(folder, **group).fingerprint for group in groups]
    assert len(set(prints)) == 3
    assert load(folder, **groups[1], rank=1).fingerprint == prints[1]


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({}, {"tensor_parallel_size": 3}, "attention heads, 8, cannot be divided by it; this model takes 1, 2, 4, 8"),
        ({"intermediate_size": 77}, {"tensor_parallel_size": 2}, "intermediate_size, 77, cannot be divided"),
        (
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            {"tensor_parallel_size": 2},
            "heads of keys and values, 3, are neither a multiple nor a divisor",
        ),
        ({"vocab_size": 5}, {"tensor_parallel_size": 4}, "vocabulary, 5, is too small"),
        ({"num_hidden_layers": 3}, {"pipeline_parallel_size": 4}, "the model has 3 layers"),
    ],
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_sizes_that_ranks_cannot_divide(
    changes: dict[str, Any], config: dict[str, Any], message: str, load_format: str, tmp_path: Path
) -> None:
    folder = save(llama(**SIZES | changes), tmp_path)
    with pytest.raises(ModelError, match=message):
        load(folder, **config, load_format=load_format)


def test_experts_that_ranks_cannot_divide(tmp_path: Path) -> None:
    folder = save(mixtral(**SIZES | {"intermediate_size": 77}), tmp_path)
    with pytest.raises(ModelError, match="intermediate size of an expert, 77, cannot be divided"):
        load(folder, tensor_parallel_size=2)


def test_quants_that_ranks_cannot_divide(tmp_path: Path) -> None:
    """Two ranks would have 48 inputs of `down`, and 4 outputs of keys, each; eight would have 12 of the former."""
    groups = save_packed(llama(**SIZES | {"intermediate_size": 96}), tmp_path / "groups", Scheme())
    words = {"num_attention_heads": 16, "head_dim": 4, "intermediate_size": 128}
    packed = save_packed(llama(**SIZES | words), tmp_path / "words", Scheme(method="awq", symmetric=False))
    with pytest.raises(ModelError, match=r"words: tensor .*k_proj.qweight: outputs 4 to 8 .* no whole words of 8"):
        load(packed, tensor_parallel_size=2, rank=1, dtype="float32")
    tables = save_tables(llama(**SIZES | {"intermediate_size": 96}), tmp_path / "tables", TableScheme())
    with pytest.raises(ModelError, match=r"tables: tensor .*down_proj.qweight: inputs 12 to 24.* no whole words of 8"):
        load(tables, tensor_parallel_size=8, rank=1, dtype="float32")
    if not extension.load():
        return
    with pytest.raises(ModelError, match=r"groups: tensor .*down_proj.weight: a rank's 48 of 96 inputs are not whole"):
        load(groups, tensor_parallel_size=2)
    plain = save(llama(**SIZES | {"intermediate_size": 96}), tmp_path / "plain")
    with pytest.raises(ModelError, match=r"plain: tensor .*down_proj.weight: a rank's 48 of 96 inputs are not whole"):
        load(plain, tensor_parallel_size=2, quantization="int8")


@pytest.mark.parametrize("flag", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_transformers_code_has_no_ranks(flag: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} needs a family of Quire's own"):
        load(save(granite(), tmp_path), **{flag: 2})

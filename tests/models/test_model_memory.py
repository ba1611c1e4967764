"""Tests that loading needs memory for the model and one more parameter, whatever the type of the checkpoint.

The tests measure private memory only, since the kernel drops and reads pages of mapped files as it likes.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from kernels.cpu import extension
from tests.models.tiny_models import llama, save

MEASURE = """
import json, sys, threading
from pathlib import Path

import torch

from kernels.load import ops
from services.worker.config import WorkerConfig
from services.worker.cpu_tuning import keep_freed_memory, set_threads
from services.worker.models.load import load_model


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def load(folder: str, **config):
    cpu = torch.device("cpu")
    return load_model(Path(folder), WorkerConfig(device="cpu", **config), cpu, ops(cpu))


def watch() -> None:
    while not done.wait(0.001):
        seen.append(anonymous())


keep_freed_memory()
set_threads(1)
small = load(sys.argv[1])
base = anonymous()
seen, done = [base], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
model = load(sys.argv[2], **json.loads(sys.argv[3]))
done.set()
watcher.join()
print(json.dumps({"peak": max(seen) - base, "held": anonymous() - base}))
"""


FLOAT32_BYTES = 2 if extension.load() else 4
"""Bytes of a number in bfloat16 for a model of float32: compiled kernels widen it when they read it."""

SIZES = {"vocab_size": 4000, "max_position_embeddings": 128}


def dense() -> PreTrainedModel:
    """Return a model of 75 million parameters."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **sizes))


def experts() -> PreTrainedModel:
    """Return a model whose largest tensors, those of all experts of a layer, are a fifth of it each."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **sizes, num_key_value_heads=2, num_local_experts=16))


@pytest.fixture(scope="module", params=[dense, experts])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """Return a tiny model, one of 150 MB in bfloat16 in several files, and the number of its parameters."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = request.param()
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_()
    large = save(model, tmp_path_factory.mktemp("large"), max_shard_size="40MB", save_original_format=False)
    assert len(list(large.glob("*.safetensors"))) > 2
    return save(llama(), tmp_path_factory.mktemp("small")), large, model.num_parameters()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "bytes_each"), [("bfloat16", 2), ("float32", FLOAT32_BYTES)])
def test_loading_takes_little_more_than_the_model(folders: tuple[Path, Path, int], dtype: str, bytes_each: int) -> None:
    small, large, parameters = folders
    assert_takes_little_more(small, large, parameters * bytes_each, dtype=dtype)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_a_rank_takes_little_more_than_its_part(
    folders: tuple[Path, Path, int], load_format: str, tp: int, pp: int
) -> None:
    """With two stages, the first one has the embedding and most layers."""
    small, large, parameters = folders
    config = json.loads((large / "config.json").read_bytes())
    table = config["vocab_size"] * config["hidden_size"]
    layers = config["num_hidden_layers"]
    own = (parameters - 2 * table) * -(-layers // pp) / layers + table * (2 if pp == 1 else 1)
    ranks = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "rank": tp - 1}
    assert_takes_little_more(small, large, own / tp * FLOAT32_BYTES, dtype="float32", load_format=load_format, **ranks)


def assert_takes_little_more(small: Path, large: Path, weights: float, **config: Any) -> None:
    """Check that loading `large` takes little more than the bytes of its weights."""
    command = [sys.executable, "-c", MEASURE, str(small), str(large), json.dumps(config)]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print({name: value / weights for name, value in measured.items()})
    assert 0.95 * weights < measured["held"]
    assert measured["peak"] < 1.1 * weights

"""The models of the examples: small ones with random weights in place of the named ones, and a server of the embedded.

Small ones have the architecture of the named ones, and contexts as long as the examples need.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from shared.hub.checkpoint import locate
from tests.models.gptq_awq_writer import Scheme, save_packed
from tests.models.peft_adapters import make_adapter
from tests.models.tiny_models import llama, opt
from tests.quire.quire_server import serving
from tests.text.vocabulary import make_backend, write_model_folder

Folders = Callable[[str], Path]

SIZES = {"vocab_size": make_backend().get_vocab_size(), "hidden_size": 64, "max_position_embeddings": 4096}
LLAMA = SIZES | {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
OPT = SIZES | {"ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 64}


@pytest.fixture(scope="session")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return what makes a folder with the files of a tokenizer and a chat template."""
    return lambda name: write_model_folder(tmp_path_factory.mktemp("models") / name, bos=True)


@pytest.fixture(scope="session")
def llama_2_7b(new_folder: Folders) -> Path:
    """Return a small Llama in place of meta-llama/Llama-2-7b, its chat model and the one with 70 billion weights."""
    return save(llama(**LLAMA), new_folder("llama-2-7b"))


@pytest.fixture(scope="session")
def opt_125m(new_folder: Folders) -> Path:
    """Return a small OPT in place of facebook/opt-125m."""
    return save(opt(**OPT), new_folder("opt-125m"))


@pytest.fixture(scope="session", params=["gptq", "awq"])
def packed(request: pytest.FixtureRequest, new_folder: Folders) -> tuple[str, Path]:
    """Return a method of quantisation, and a checkpoint of it in place of TheBloke/Llama-2-7b-Chat-GPTQ."""
    method = str(request.param)
    return method, save_packed(llama(**LLAMA), new_folder(method), Scheme(method, symmetric=False))


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the adapters of the Llama that the guide names."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("adapter_1", "adapter_2", "adapter_3")):
        make_adapter(llama(**LLAMA), folder / name, seed=seed)
    return folder


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a server of the embedded model, under the names that the documents' clients ask for.

    It is started by the flags of the documents' start line. The others are those of all tests' servers.
    """
    flags = ["--host", "0.0.0.0", "--gpu-memory-utilization", "0.90", "--max-model-len", "4096"]
    flags += ["--served-model-name=meta-llama/Llama-2-7b-chat-hf", "--kv-cache-memory=0.3"]
    with serving(locate(""), tmp_path_factory.mktemp("server"), *flags, name="llama-2-7b") as server:
        yield server.url


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder

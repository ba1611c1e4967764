"""Tests how the name of a model becomes a folder, and the errors if there is none."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, constants

from services.gateway.config import GatewayConfig
from services.gateway.served_model import tokenizer_folder
from shared.errors import ConfigError, ModelError
from shared.hub import checkpoint
from shared.hub.checkpoint import locate, locate_tokenizer
from shared.hub.download import files_to_fetch, gguf_files
from tests.gguf.gguf_writer import write
from tests.models.tiny_models import llama


def test_a_folder_with_a_config_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "there is no folder /no/such/folder"),
        ("./here", "there is no folder ./here"),
        ("a/b/c", "there is no folder a/b/c"),
        ("not a name", "neither a folder nor a Hugging Face name"),
    ],
)
def test_what_cannot_be_a_model_is_refused_without_asking_the_hub(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        locate(name)


def test_a_folder_without_config_and_a_file_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        locate(str(tmp_path))
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelError, match=r"name the file itself: .*model\.gguf"):
        locate(str(tmp_path))
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        locate(str(tmp_path / "model.bin"))


def test_a_gguf_file_that_is_none_or_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelError, match=r"model\.gguf is not a GGUF file"):
        locate(str(tmp_path / "model.gguf"))
    with pytest.raises(ModelError, match=r"there is no file .*other\.gguf"):
        locate(str(tmp_path / "other.gguf"))


def test_a_tokenizer_may_lie_alone(tmp_path: Path) -> None:
    assert locate_tokenizer(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match="there is no folder"):
        locate_tokenizer(str(tmp_path / "nothing"))


def test_offline_a_model_that_is_not_cached_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="not in the Hugging Face cache"):
        locate("some-owner/some-model-that-nobody-has")


def test_when_the_hub_is_silent_what_was_fetched_earlier_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(self: HfApi, *args: object, **options: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(HfApi, "model_info", silent)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate("owner/model") == tmp_path


def test_one_format_of_weights_is_fetched() -> None:
    small = ["config.json", "tokenizer.json"]
    other = ["README.md", "onnx/model.onnx", "tf_model.h5", "flax_model.msgpack", "model.gguf"]
    safe = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert files_to_fetch([*small, *other, *safe, "pytorch_model.bin"]) == [*safe, *small]
    assert files_to_fetch([*small, *other, "pytorch_model.bin", "a.pt"]) == ["pytorch_model.bin", *small]
    assert files_to_fetch([*small, *other, "sq-llama-7b-w4-s0.pt"]) == ["sq-llama-7b-w4-s0.pt", *small]
    assert files_to_fetch([*small, *other, *safe], weights=False) == small
    assert files_to_fetch(["adapter.safetensors", *small]) == ["adapter.safetensors", *small]


def test_downloads_go_to_the_folder_and_revision_that_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """API-02: --download-dir and --tokenizer-revision."""
    asked: list[tuple[object, object]] = []

    def fetch(name: str, *, revision: str | None, cache_dir: str | None, **_: object) -> str:
        asked.append((revision, cache_dir))
        return str(tmp_path)

    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=[]))
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    (tmp_path / "config.json").write_text("{}")
    locate("owner/model", "v1", "/models")
    config = GatewayConfig(tokenizer="owner/other", tokenizer_revision="v2", download_dir="/texts")
    assert tokenizer_folder(config) == tmp_path
    assert asked == [("v1", "/models"), ("v2", "/texts")]
    with pytest.raises(ConfigError, match="--tokenizer-revision needs --tokenizer"):
        tokenizer_folder(GatewayConfig(tokenizer_revision="v2"))


GGUF = ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "mmproj-Q4_K_M.gguf", "BF16/a-BF16-00001-of-00002.gguf"]
GGUF += ["BF16/a-BF16-00002-of-00002.gguf", "a.q8_0.gguf", "README.md"]


def test_a_gguf_file_is_chosen_by_its_type() -> None:
    assert gguf_files(GGUF, "Q4_K_M") == ["a-Q4_K_M.gguf"]
    assert gguf_files(GGUF, "Q8_0") == ["a.q8_0.gguf"]
    assert gguf_files(GGUF, "bf16") == GGUF[3:5]
    with pytest.raises(ModelError, match=r"no GGUF file of type Q4_K; there are: BF16/a-.*, a\.q8_0\.gguf"):
        gguf_files(GGUF, "Q4_K")
    with pytest.raises(ModelError, match=r"Q4_K_M may be any of a-Q4_K_M\.gguf, b-Q4_K_M\.gguf"):
        gguf_files(["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "Q4_K_M")
    with pytest.raises(ModelError, match="name one by its type, as in owner/name:Q4_K_M: a-Q4_K_M"):
        files_to_fetch([*GGUF, "config.json"])


def test_a_gguf_file_on_hugging_face_is_named_by_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the hub, since the cache has all the answers."""

    def silent(self: HfApi, *args: object, **options: object) -> None:
        raise ConnectionError("no route to host")

    asked: list[str] = []
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(HfApi, "model_info", silent)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: asked.append(name) or str(tmp_path / "snapshot")
    )
    (tmp_path / "snapshot" / "deep").mkdir(parents=True)
    file = write(llama(), tmp_path / "snapshot" / "deep" / "tiny-F32.gguf")
    assert locate("owner/model:F32") == locate(str(file))
    assert asked == ["owner/model"]


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkpoint.cache_folder() == tmp_path / "quire"
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "own"))
    assert checkpoint.cache_folder() == tmp_path / "own"

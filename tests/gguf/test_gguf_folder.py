"""Tests that a GGUF file's folder is made once, never seen incomplete, renewed if needed, and names the weights."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from services.worker.checkpoint.model_folder import ModelFolder, find_weights
from services.worker.checkpoint.weight_files import WeightFiles
from shared.errors import ModelError
from shared.gguf import folder as gguf_folder
from shared.gguf.folder import FORMAT, POINTER, model_folder, read_pointer
from tests.gguf.gguf_writer import plain_vocabulary, write
from tests.models.tiny_models import llama

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(llama(), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def file(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of folders that are written, in order."""
    folders: list[Path] = []
    write_folder = gguf_folder._write

    def counted(parts: tuple[Path, ...], folder: Path, sampling: dict[str, object]) -> None:
        folders.append(folder)
        write_folder(parts, folder, sampling)

    monkeypatch.setattr(gguf_folder, "_write", counted)
    return folders


def test_it_has_configuration_and_no_weights(file: Path, tmp_path: Path) -> None:
    folder = model_folder(file, tmp_path / "cache", {"temperature": 0.5})
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", POINTER}
    assert json.loads((folder / "generation_config.json").read_bytes()) == {"temperature": 0.5}
    assert WeightFiles(ModelFolder.read(folder)).paths == [file]


def test_it_is_made_once_by_starts_at_the_same_time(file: Path, tmp_path: Path, written: list[Path]) -> None:
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        assert (model_folder(file, tmp_path / "cache") / "config.json").is_file()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1


def test_a_killed_start_leaves_nothing_that_matters(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    partial = cache / f".{model_folder(file, tmp_path / 'other').name}.partial"
    partial.mkdir(parents=True)
    (partial / "vocab.txt").write_text("half")
    folder = model_folder(file, cache)
    assert not partial.exists()
    assert not (folder / "vocab.txt").exists()


def test_a_folder_of_an_older_format_is_made_anew(
    file: Path, tmp_path: Path, written: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(file, tmp_path / "cache")
    (folder / "config.json").write_text("{}")
    assert model_folder(file, tmp_path / "cache") == folder
    assert len(written) == 1
    monkeypatch.setattr(gguf_folder, "FORMAT", FORMAT + 1)
    assert model_folder(file, tmp_path / "cache") == folder
    assert len(written) == 2
    assert json.loads((folder / "config.json").read_bytes())["model_type"] == "llama"
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_a_file_that_moved_keeps_its_folder(file: Path, tmp_path: Path, written: list[Path]) -> None:
    folder = model_folder(file, tmp_path / "cache")
    moved = tmp_path / "elsewhere" / file.name
    moved.parent.mkdir()
    file.rename(moved)
    with pytest.raises(ModelError, match="there is no file"):
        model_folder(file, tmp_path / "cache")
    with pytest.raises(ModelError, match="there is no file"):
        WeightFiles(ModelFolder.read(folder))  # a folder alone, whose file is gone
    assert model_folder(moved, tmp_path / "cache") == folder
    assert len(written) == 1
    assert WeightFiles(ModelFolder.read(folder)).get(EMBEDDING).shape == (131, 60)


def test_a_relative_path_is_kept_as_an_absolute_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    pointer = read_pointer(model_folder(Path(file.name), tmp_path / "cache"))
    assert pointer is not None
    assert pointer.files == [str(file)]


def test_another_file_of_that_name_gets_another_folder(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write(llama(vocab_size=132), tmp_path / "other" / file.name)
    assert model_folder(file, tmp_path / "cache") != model_folder(other, tmp_path / "cache")


def test_a_failing_start_leaves_no_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(parts: tuple[Path, ...], folder: Path, sampling: object) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_folder, "_write", full_disk)
    with pytest.raises(ModelError, match=r"No space left.*QUIRE_CACHE"):
        model_folder(file, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_full_disk_is_a_clear_error(file: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))  # less than tokenizer.json, which comes first
    try:
        with pytest.raises(ModelError) as caught:
            model_folder(file, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.fullmatch(f"cannot put the settings of {file} into .*File too large.*; QUIRE_CACHE.*", str(caught.value))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_folder_that_lost_a_file_is_made_anew(name: str, file: Path, tmp_path: Path, written: list[Path]) -> None:
    folder = model_folder(file, tmp_path / "cache")
    before = (folder / name).read_bytes()
    (folder / name).unlink()
    assert model_folder(file, tmp_path / "cache") == folder
    assert (folder / name).read_bytes() == before
    assert len(written) == 2


def test_a_folder_that_never_had_a_tokenizer_is_complete(tmp_path: Path, written: list[Path]) -> None:
    vocabulary = plain_vocabulary(131) | {"pre": "strange"}
    file = write(llama(num_hidden_layers=1), tmp_path / "model.gguf", vocabulary=vocabulary)
    assert model_folder(file, tmp_path / "cache") == model_folder(file, tmp_path / "cache")
    assert len(written) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_a_clear_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(ModelError, match=r"Permission denied.*QUIRE_CACHE"):
        model_folder(file, tmp_path / "cache")


def test_a_cache_that_is_a_file_is_a_clear_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ModelError, match="QUIRE_CACHE names another place"):
        model_folder(file, tmp_path / "cache")


def test_making_and_reading_it_takes_no_torch(file: Path, tmp_path: Path) -> None:
    """The gateway, whose image has no torch, may be the first to make the folder."""
    code = (
        "import sys; from pathlib import Path; from shared.hub.checkpoint import locate\n"
        "from shared.text.tokenizer import Tokenizer\n"
        f"Tokenizer.load(locate({str(file)!r}))\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    environment = {**os.environ, "QUIRE_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    code += "assert not {'gguf', 'numpy'} & sys.modules.keys()\n"  # since the folder is there now
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_load_format_may_ask_for_it_and_for_another(file: Path, tmp_path: Path) -> None:
    folder = model_folder(file, tmp_path / "cache")
    assert WeightFiles(ModelFolder.read(folder), "gguf").names == WeightFiles(ModelFolder.read(folder)).names
    with pytest.raises(ModelError, match=r"no weights; none of model\.safetensors"):
        WeightFiles(ModelFolder.read(folder), "safetensors")
    with pytest.raises(ModelError, match=r"was not made of a GGUF file; name the \.gguf file itself"):
        find_weights(tmp_path, "gguf")

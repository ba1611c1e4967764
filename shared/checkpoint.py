"""Where a model's files are: from a folder, a GGUF file, a Hugging Face name, or nothing, to a local folder.

Every service that reads model files calls `locate` and gets the same folder. Downloads go through huggingface_hub and
into its own cache, so `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they always do. A GGUF file, such as the
embedded model, gets a folder in Quire's cache the first time somebody asks for it.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from shared.embedded import RECOMMENDED, embedded_file
from shared.errors import ModelError
from shared.gguf.folder import model_folder

PATIENCE = 10.0
"""Seconds for the hub to answer what files a model has; then what was fetched earlier is used."""

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
"""Configuration, tokenizer and chat template, under the names that the field uses for them."""


def cache_folder() -> Path:
    """Where Quire keeps what it makes: `QUIRE_CACHE`, or the user's cache folder."""
    if own := os.environ.get("QUIRE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire"


def locate(model: str, revision: str | None = None) -> Path:
    """The local folder of `model`: a folder, a GGUF file, a Hugging Face name (downloaded if need be), or '' for the
    embedded one.

    Raises `ModelError`, with what to do about it, if it cannot be had.
    """
    if not model:
        return model_folder(embedded_file(), cache_folder() / "gguf", RECOMMENDED)
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.suffix == ".gguf":
        return model_folder(path, cache_folder() / "gguf")
    if path.exists():
        raise ModelError(
            f"{model} is a file; a model is a folder with config.json, a .gguf file or a Hugging Face name"
        )
    if _looks_like_path(model):
        raise ModelError(f"there is no folder {model}")
    return _checked(_download(model, revision))


def locate_tokenizer(name: str) -> Path:
    """The local folder of a tokenizer: a model's, as `locate` has it, or one that holds nothing else."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" or path.exists() or _looks_like_path(name):
        return locate(name)
    return _download(name, None, weights=False)


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        hint = f"; name the file itself: {files[0]}" if files else ""
        raise ModelError(f"{folder} has no config.json, so it is not a model folder{hint}")
    return folder


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model


def _download(name: str, revision: str | None, *, weights: bool = True) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        siblings = HfApi().model_info(name, revision=revision, timeout=PATIENCE).siblings or []
        files = wanted_files([sibling.rfilename for sibling in siblings], weights=weights)
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a folder nor a Hugging Face name") from error
    except (HTTPError, OSError) as error:  # OSError: offline by the user's wish, or a full disk
        if not _is_answer(error):
            with suppress(LocalEntryNotFoundError):
                return Path(snapshot_download(name, revision=revision, local_files_only=True))
        raise ModelError(_reason(name, revision, error)) from error


def _is_answer(error: Exception) -> bool:
    """Whether the hub has said no; otherwise it could not be asked, and what was fetched earlier will do."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError))


def wanted_files(files: Sequence[str], *, weights: bool = True) -> list[str]:
    """Of a repository's files at its top level, those needed to serve it: weights in one format, and the small ones."""
    top = [name for name in files if "/" not in name]

    def matching(patterns: Iterable[str]) -> list[str]:
        return [name for name in top if any(fnmatch(name, pattern) for pattern in patterns)]

    heavy = matching(["model*.safetensors"]) or matching(["*.safetensors"]) or matching(["pytorch_model*.bin"])
    return (heavy if weights else []) + matching(SMALL_FILES)


def _reason(name: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{name} is gated: accept its terms on Hugging Face and set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision {revision!r}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no folder {name}, and no such model on Hugging Face that this HF_TOKEN may see"
    if HF_HUB_OFFLINE:
        return f"{name} is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids to fetch it"
    return f"there is no folder {name}, and it cannot be fetched from Hugging Face ({type(error).__name__}: {error})"

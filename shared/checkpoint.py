"""Where a model's files are: from a folder, a Hugging Face name, or nothing (the embedded model) to a local folder.

Every service that reads model files calls `locate` and gets the same folder. Downloads go through huggingface_hub and
into its own cache, so `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they always do. The embedded model is made
by `quire pull`; here is only where it lies.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from shared.errors import ModelError

EMBEDDED = "SmolLM2-135M-Instruct"

PATIENCE = 10.0
"""Seconds for the hub to answer what files a model has; then what was fetched earlier is used."""

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
"""Configuration, tokenizer and chat template, under the names that the field uses for them."""


def cache_folder() -> Path:
    """Where Quire keeps what it makes: `QUIRE_CACHE`, or the user's cache folder."""
    if own := os.environ.get("QUIRE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire"


def embedded_folder() -> Path:
    """Where the embedded model lies once it is converted; it is there in whole or not at all."""
    return cache_folder() / "models" / EMBEDDED


def locate(model: str, revision: str | None = None) -> Path:
    """The local folder of `model`: a folder, a Hugging Face name (downloaded if need be), or '' for the embedded one.

    Raises `ModelError`, with what to do about it, if it cannot be had.
    """
    if not model:
        return _embedded()
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if folder.exists():
        raise ModelError(f"{model} is a file; a model is a folder with config.json, or a Hugging Face name")
    if _looks_like_path(model):
        raise ModelError(f"there is no folder {model}")
    return _checked(_download(model, revision))


def _embedded() -> Path:
    folder = embedded_folder()
    if not (folder / "config.json").is_file():
        raise ModelError(f"the embedded model is not in {folder}; run `quire pull` to put it there")
    return folder


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json, so it is not a model folder")
    return folder


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        siblings = HfApi().model_info(name, revision=revision, timeout=PATIENCE).siblings or []
        files = wanted_files([sibling.rfilename for sibling in siblings])
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


def wanted_files(files: Sequence[str]) -> list[str]:
    """Of a repository's files at its top level, those needed to serve it: weights in one format, and the small ones."""
    top = [name for name in files if "/" not in name]

    def matching(patterns: Iterable[str]) -> list[str]:
        return [name for name in top if any(fnmatch(name, pattern) for pattern in patterns)]

    weights = matching(["model*.safetensors"]) or matching(["*.safetensors"]) or matching(["pytorch_model*.bin"])
    return weights + matching(SMALL_FILES)


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

"""Downloads models with huggingface_hub: chooses the files, and explains errors."""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from shared.errors import ModelError
from shared.gguf.parts import PART_NAME, is_gguf

HUB_TIMEOUT = 10.0
"""Seconds for the hub to list the files of a model. After them, an earlier download is used."""

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
"""Patterns of the configuration, tokenizer and chat template files."""


def download(
    name: str, revision: str | None, choose: Callable[[Sequence[str]], list[str]], cache: str | None = None
) -> Path:
    """Download the files of a repository that `choose` selects, and return their folder.

    If the hub cannot be reached, return an earlier download. The folder is in `cache`, by default Hugging Face's own.
    Raise `ModelError`, with advice.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        siblings = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT).siblings or []
        files = choose([sibling.rfilename for sibling in siblings])
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, cache_dir=cache))
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a folder nor a Hugging Face name") from error
    except (HTTPError, OSError) as error:  # OSError: HF_HUB_OFFLINE is set, or the disk is full
        if not _is_refusal(error):
            with suppress(LocalEntryNotFoundError):
                return Path(snapshot_download(name, revision=revision, local_files_only=True, cache_dir=cache))
        raise ModelError(_reason(name, revision, error)) from error


def _is_refusal(error: Exception) -> bool:
    """Return whether the hub refused. Otherwise it could not be reached, and an earlier download can be used."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError))


def files_to_fetch(files: Sequence[str], *, weights: bool = True) -> list[str]:
    """Return the files at a repository's top level that serving needs: weights of one format, and the small files."""
    top = [name for name in files if "/" not in name]

    def matching(patterns: Iterable[str]) -> list[str]:
        return [name for name in top if any(fnmatch(name, pattern) for pattern in patterns)]

    patterns = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.pt")
    weight_files = next((found for pattern in patterns if (found := matching([pattern]))), [])
    if weights and not weight_files and (others := [name for name in files if is_gguf(name)]):
        raise ModelError(f"it has GGUF files; name one by its type, as in owner/name:Q4_K_M: {', '.join(others)}")
    return (weight_files if weights else []) + matching(SMALL_FILES)


def gguf_files(files: Sequence[str], quantization: str) -> list[str]:
    """Return a repository's GGUF file of this type, or its parts. Raise `ModelError`, which lists the files."""
    available = sorted(name for name in files if is_gguf(name) and "mmproj" not in name.lower())
    pattern = re.compile(rf"(^|[-._/]){re.escape(quantization)}([-./]|$)", re.IGNORECASE)
    matches = [name for name in available if pattern.search(name)]
    if len(matches) > 1 and not all(PART_NAME.fullmatch(name) for name in matches):
        raise ModelError(f"{quantization} may be any of {', '.join(matches)}; fetch one and name the file itself")
    if not matches:
        raise ModelError(f"there is no GGUF file of type {quantization}; there are: {', '.join(available) or 'none'}")
    return matches


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
        return f"{name} is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids fetching it"
    return f"there is no folder {name}, and it cannot be fetched from Hugging Face ({type(error).__name__}: {error})"

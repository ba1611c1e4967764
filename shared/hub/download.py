"""Fetching from Hugging Face, by huggingface_hub and into its cache: which files, and what to say if it fails."""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from shared.errors import ModelError
from shared.gguf.parts import PART_NAME, is_gguf

PATIENCE = 10.0
"""Seconds for the hub to answer what files a model has; then what was fetched earlier is used."""

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
"""Configuration, tokenizer and chat template, under the names that the field uses for them."""


def download(
    name: str, revision: str | None, choose: Callable[[Sequence[str]], list[str]], cache: str | None = None
) -> Path:
    """The folder with the files that `choose` picks of a repository's; what was fetched earlier if there is no network.

    It lies in the folder `cache`, or in Hugging Face's own. Raises `ModelError`, with what to do about it.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        siblings = HfApi().model_info(name, revision=revision, timeout=PATIENCE).siblings or []
        files = choose([sibling.rfilename for sibling in siblings])
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, cache_dir=cache))
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a folder nor a Hugging Face name") from error
    except (HTTPError, OSError) as error:  # OSError: offline by the user's wish, or a full disk
        if not _is_answer(error):
            with suppress(LocalEntryNotFoundError):
                return Path(snapshot_download(name, revision=revision, local_files_only=True, cache_dir=cache))
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
    if weights and not heavy and (others := [name for name in files if is_gguf(name)]):
        raise ModelError(f"of these GGUF files name one by its type, as in owner/name:Q4_K_M: {', '.join(others)}")
    return (heavy if weights else []) + matching(SMALL_FILES)


def gguf_files(files: Sequence[str], quantisation: str) -> list[str]:
    """Of a repository's files, the GGUF file of this type, or the parts of it. Raises `ModelError` naming others."""
    there = sorted(name for name in files if is_gguf(name) and "mmproj" not in name.lower())
    word = re.compile(rf"(^|[-._/]){re.escape(quantisation)}([-./]|$)", re.IGNORECASE)
    found = [name for name in there if word.search(name)]
    if len(found) > 1 and not all(PART_NAME.fullmatch(name) for name in found):
        raise ModelError(f"{quantisation} may be any of {', '.join(found)}; fetch one and name the file itself")
    if not found:
        raise ModelError(f"there is no GGUF file of type {quantisation}; there are: {', '.join(there) or 'none'}")
    return found


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

"""`locate`: finds the local folder of a model, given a folder, a GGUF file, a Hugging Face name or nothing.

Every service that reads model files calls it and gets the same folder. Downloads use huggingface_hub and its cache, so
`HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` have their usual meaning. For a GGUF file, such as the embedded model, a
folder is made in Quire's cache on first use.
"""

import hashlib
import os
from functools import partial
from pathlib import Path

from shared.errors import ModelError
from shared.gguf.folder import model_folder
from shared.gguf.parts import GGUF_GLOB, is_gguf
from shared.hub.download import download, files_to_fetch, gguf_files
from shared.hub.embedded import RECOMMENDED, embedded_file

TOKENIZER_FILES = (
    "config.json",
    "tokenizer.json",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
)


def cache_folder() -> Path:
    """Return the folder for files that Quire makes: `QUIRE_CACHE`, or quire in the user's cache folder."""
    if folder := os.environ.get("QUIRE_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire"


def locate(model: str, revision: str | None = None, cache: str | None = None) -> Path:
    """Return the local folder of `model`, and download it if needed.

    `model` is a folder, a GGUF file, a Hugging Face name, such a name with a GGUF type (`owner/name:Q4_K_M`), or '' for
    the embedded model. `cache` is the folder for downloads, by default Hugging Face's own. If the model cannot be
    found, raise `ModelError` with advice.
    """
    if not model:
        return model_folder(embedded_file(), cache_folder() / "gguf", RECOMMENDED)
    path = Path(model).expanduser()
    if path.is_dir():
        return _check_config(path)
    if is_gguf(path.name):
        return model_folder(path, cache_folder() / "gguf")
    if path.exists():
        raise ModelError(
            f"{model} is a file; a model is a folder with config.json, a .gguf file or a Hugging Face name"
        )
    if _looks_like_path(model):
        raise ModelError(f"there is no folder {model}")
    name, _, quantization = model.partition(":")
    if quantization:
        choose = partial(gguf_files, quantization=quantization)
        folder = download(name, revision, choose, cache)
        files = choose([str(file.relative_to(folder)) for file in folder.rglob(GGUF_GLOB)])
        return model_folder(folder / files[0], cache_folder() / "gguf")
    return _check_config(download(model, revision, files_to_fetch, cache))


def locate_tokenizer(name: str, revision: str | None = None, cache: str | None = None) -> Path:
    """Return the local folder of a tokenizer: of a whole model, as `locate` returns it, or of a tokenizer alone."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    try:
        if is_gguf(path.name) or path.exists() or ":" in name or _looks_like_path(name):
            return locate(name, revision, cache)
        return download(name, revision, partial(files_to_fetch, weights=False), cache)
    except ModelError as error:
        raise ModelError(f"--tokenizer: {error}") from error


def text_digest(folder: Path) -> str:
    """Return a digest of a model folder's tokenizer files, in sixteen hexadecimal digits.

    It does not include the chat template, which only produces text: the gateway may use another one.
    """
    digest = hashlib.sha256()
    for path in sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _check_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob(GGUF_GLOB))
        hint = f"; name the file itself: {files[0]}" if files else ""
        raise ModelError(f"{folder} has no config.json, so it is not a model folder{hint}")
    return folder


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model

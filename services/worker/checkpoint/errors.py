"""`name_folder_in_errors`: whatever goes wrong while a model is loaded becomes one ModelError that names its folder.

Faults that are foreseen are checked where a file is read, and say what is wrong. A config.json or a weight file can be
broken in more ways than anyone foresees; then the error's own words have to do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shared.errors import ModelError, QuireError
from shared.gguf.folder import read_pointer


@contextmanager
def name_folder_in_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the block into ModelErrors that name `folder`, or the GGUF file it was made of."""
    try:
        yield
    except ModelError as error:
        if any(name in str(error) for name in _names(folder)):
            raise
        raise ModelError(f"{_names(folder)[0]}: {error}") from error
    except torch.OutOfMemoryError as error:
        message = f"the model does not fit into the GPU's memory ({_first_line(error)})"
        raise ModelError(f"{_names(folder)[0]}: {message}") from error
    except QuireError:
        raise
    except Exception as error:  # of ours, torch's, safetensors' and others' code
        message = f"cannot be loaded: {type(error).__name__}: {_first_line(error)}"
        raise ModelError(f"{_names(folder)[0]}: {message}") from error


def _names(folder: Path) -> list[str]:
    """Return the files and folders that tell a user which model is meant, the best first."""
    pointer = read_pointer(folder)
    return [*(pointer.files if pointer else ()), str(folder)]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

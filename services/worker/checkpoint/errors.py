"""`name_folder_in_errors`: turns all errors of loading a model into ModelErrors that name its folder.

The code that reads a file checks for the expected errors, and says what is wrong. Files can be broken in other ways.
For those, the message of the exception must be enough.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shared.errors import ModelError, QuireError
from shared.gguf.folder import read_pointer


@contextmanager
def name_folder_in_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the block into ModelErrors that name `folder`, or the GGUF file that it was made from."""
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
    except Exception as error:  # from any code: Quire's, torch's, safetensors'
        message = f"cannot be loaded: {type(error).__name__}: {_first_line(error)}"
        raise ModelError(f"{_names(folder)[0]}: {message}") from error


def _names(folder: Path) -> list[str]:
    """Return the names by which a user knows the model, the best first."""
    pointer = read_pointer(folder)
    return [*(pointer.files if pointer else ()), str(folder)]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

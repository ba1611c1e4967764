"""The last net under the loading of a model: whatever goes wrong becomes one ModelError that names the model's folder.

What is foreseen is checked where it is read, and says what is at fault. A config.json or a weight file can be broken
in more ways than anyone foresees; then the error's own words have to do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shared.errors import ModelError, QuireError
from shared.gguf.folder import read_pointer


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Errors of the block as ModelErrors that name `folder`, or the GGUF file it was made of."""
    try:
        yield
    except ModelError as error:
        if any(place in str(error) for place in _places(folder)):
            raise
        raise ModelError(f"{_places(folder)[0]}: {error}") from error
    except torch.OutOfMemoryError as error:
        message = f"the model does not fit into the GPU's memory ({_first_line(error)})"
        raise ModelError(f"{_places(folder)[0]}: {message}") from error
    except QuireError:
        raise
    except Exception as error:  # of ours, torch's, safetensors' and others' code
        message = f"cannot be loaded: {type(error).__name__}: {_first_line(error)}"
        raise ModelError(f"{_places(folder)[0]}: {message}") from error


def _places(folder: Path) -> list[str]:
    """The files and folders that tell a user which model is meant, the best first."""
    pointer = read_pointer(folder)
    return [*(pointer.files if pointer else ()), str(folder)]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

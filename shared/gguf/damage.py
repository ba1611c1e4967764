"""A last net under the reading of GGUF files: what no check foresaw is still told in one line that names the file."""

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import ModelError

_SYMPTOMS = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError)


@contextmanager
def blamed_on(what: object) -> Iterator[None]:
    """What a damaged file can make numpy, `tokenizers` or ourselves raise within becomes a `ModelError` about `what`.

    Such a file deserves a check of its own, with a message that says what is wrong; this is for until it has one.
    """
    try:
        yield
    except _SYMPTOMS as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{what} cannot be read ({type(error).__name__}: {reason})") from error

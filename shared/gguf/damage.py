"""`damage_as_model_error`: turns unexpected exceptions from reading a file or a folder into a ModelError naming it."""

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import ModelError

_EXCEPTIONS = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError, OSError, MemoryError)


@contextmanager
def damage_as_model_error(subject: object) -> Iterator[None]:
    """Raise a `ModelError` about `subject` for what a damaged file makes a library or Quire raise.

    It is for damage that no check expects. Prefer a check, which gives a better message.
    """
    try:
        yield
    except _EXCEPTIONS as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{subject} cannot be read ({type(error).__name__}: {reason})") from error

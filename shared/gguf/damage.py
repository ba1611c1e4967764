"""`damage_as_model_error`: turns unexpected exceptions from reading a GGUF file into a ModelError that names it."""

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import ModelError

_EXCEPTIONS = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError)


@contextmanager
def damage_as_model_error(subject: object) -> Iterator[None]:
    """Raise a `ModelError` about `subject` for what a damaged file makes numpy, `tokenizers` or Quire raise.

    It is for damage that no check expects. Prefer a check, which gives a better message.
    """
    try:
        yield
    except _EXCEPTIONS as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{subject} cannot be read ({type(error).__name__}: {reason})") from error

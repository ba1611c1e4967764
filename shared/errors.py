"""The errors that cross a boundary, in one flat family.

Each boundary translates them: the gateway into OpenAI error bodies, the command line into one line on stderr, the
offline `LLM` raises them as they are. Anything else that escapes is a bug of ours and is treated as one.
"""

import reprlib

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


class QuireError(Exception):
    """Base of the errors that are meant for a user's eyes."""


class InvalidRequest(QuireError, ValueError):
    """The caller asked for something that cannot be done; `param` names the field at fault, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class Overloaded(QuireError):
    """The waiting queue is full; `retry_after` is a guess, in seconds, of when it will not be."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class Unavailable(QuireError):
    """No engine can take the request now (starting, draining or gone)."""


class EngineFailure(QuireError):
    """The engine gave up on a request it had accepted."""


class ModelError(QuireError):
    """A model folder cannot be found, read or served; the message says which file, tensor or field is at fault."""


class ConfigError(QuireError):
    """A flag, environment variable or configuration file key is wrong; the message names it."""


class ProtocolError(QuireError):
    """A peer sent something that is not a message of this protocol version."""


def brief(value: object) -> str:
    """Return the repr of a value that a client sent, cut to a line: it may be megabytes, and is not copied whole."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python does not print integers of more than some thousand digits
        return f"<{type(value).__name__}>"

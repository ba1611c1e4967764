"""The exceptions that cross a boundary, in one flat family.

Each boundary translates them: the gateway into OpenAI error bodies, the command line into one line on stderr. The
offline `LLM` raises them unchanged. Any other exception that escapes is a bug of Quire and is treated as one.
"""

import reprlib

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


class QuireError(Exception):
    """The base of the errors that a user may see."""


class InvalidRequest(QuireError, ValueError):
    """The caller asked for something that cannot be done. `param` names the wrong field, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def context_exceeded(max_model_len: int, found: str, param: str) -> InvalidRequest:
    """Return the refusal of what does not fit the context.

    Client libraries know it by its words, as servers differ in all else: LangChain by the first part, which is left
    out if only `max_tokens` is too large, LiteLLM and pydantic-ai by the second.
    """
    message = f"this model's maximum context length is {max_model_len} tokens, but {found}"
    return InvalidRequest(message if param == "max_tokens" else f"the prompt is too long: {message}", param)


class Overloaded(QuireError):
    """The waiting queue is full. `retry_after` is an estimate, in seconds, of when it will not be."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class Unavailable(QuireError):
    """No engine can accept the request now, since all are starting, draining or gone."""


class EngineFailure(QuireError):
    """The engine gave up on a request it had accepted."""


class ModelError(QuireError):
    """A model folder cannot be found, read or served. The message names the wrong file, tensor or field."""


class ConfigError(QuireError):
    """A flag, environment variable or configuration file key is wrong. The message names it."""


class ReplayFailure(QuireError):
    """The replay of a record came to something else than what was recorded."""


class ProtocolError(QuireError):
    """A peer sent something that is not a message of this protocol version."""


def brief(value: object) -> str:
    """Return the repr of a client's value, shortened to a line without copying the whole, which may be megabytes."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return f"<{type(value).__name__}>"

"""Bounds of a request: the length of its body, and the number of values in it.

One loop serves all streams of a gateway, so no request may block the loop, or hold the interpreter, for long. A decoder
builds all values of a body in one call, during which nothing else runs. The values are counted first, so that the call
is short: a list or object takes up to 300 ns (garbage collection included), a string 100 ns, a number 20 ns. The bounds
of single fields, which `quire.LLM` has too, are in `shared/params.py`.
"""

from shared.errors import InvalidRequest

MIB = 1024 * 1024

BASE_BODY = 4 * MIB  # bytes; the context's tokens come on top
BYTES_PER_TOKEN = 32  # a token has some four characters, and a character up to six bytes of JSON
MAX_BODY = 16 * MIB  # bytes, without --max-body-size

SMALL_BODY = 64 * 1024  # bytes; such a body is decoded on the loop, which takes at most four milliseconds

MAX_NESTED = 32_768  # lists and objects in a body
MAX_STRINGS = 131_072  # keys included
MAX_VALUES = 1_048_576  # mostly token ids

MAX_SAMPLES = 1024
"""Prompts times n of one request: as many as the engine's queue takes by default."""

MAX_LOGPROBS_AT_ONCE = 8_000_000
"""Log-probabilities of output tokens, alternatives included, that are held at once for an answer: all of them unless
it is a stream. They take some hundred bytes each until they are sent. A chat that sets no max_tokens may have all
alternatives of 256 Ki tokens."""

MAX_TOKENS = 1_048_576
"""Token ids in an answer of /tokenize: making a list of them takes 20 ms."""

MAX_TEXT = 16 * MIB
"""Bytes of text in an answer of /detokenize. Some tokens are a hundred spaces, so that few ids can be much text."""

MAX_LISTED = 65_536
"""Entries of lists of tokens (`logit_bias`, `stop_token_ids`, ...) times prompts: they go to the engine with each."""

MAX_REPEATED = 16 * MIB
"""Characters of prompts that one answer repeats, as text or as token ids, since each choice may have a copy."""

CHARACTERS_PER_ID = 7  # in JSON, the comma included

MAX_ID_LENGTH = 128  # characters

_NOT_COMMAS = bytes(set(range(256)) - set(b","))
_NOT_OPENING = bytes(set(range(256)) - set(b"[{"))


def max_body_size(max_model_len: int) -> int:
    """Return the maximum size of a body, in bytes, for a context of `max_model_len` tokens."""
    return min(BASE_BODY + BYTES_PER_TOKEN * max_model_len, MAX_BODY)


def check_values(body: bytes) -> None:
    """Raise `InvalidRequest` if decoding `body` would build too many values. Each pass reads several GB/s."""
    if len(body) <= SMALL_BODY or (body.count(b'"') <= 2 * MAX_STRINGS and _within(*_count(body))):
        return  # nearly always: these counts are upper bounds, since they include characters inside strings
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now each quote begins or ends a string
    num_strings = unescaped.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise InvalidRequest(f"the body holds {num_strings} strings, but at most {MAX_STRINGS} are allowed")
    num_nested, num_values = _count(b"".join(unescaped.split(b'"')[::2]))
    if not _within(num_nested, num_values):
        raise InvalidRequest(
            f"the body holds {num_nested} lists and objects, and {num_values} values, but at most {MAX_NESTED} and "
            f"{MAX_VALUES} are allowed"
        )


def is_id(text: str) -> bool:
    """Return whether `text` can be a request's id, which is written to headers and logs."""
    return 0 < len(text) <= MAX_ID_LENGTH and text.isascii() and text.isprintable()


def check_repeated(field: str, length: int, num_choices: int) -> None:
    """Raise `InvalidRequest` if an answer of `num_choices` would repeat too much of its prompts, because of `field`.

    `length` is the number of characters that each choice repeats.
    """
    if length * num_choices > MAX_REPEATED:
        raise InvalidRequest(
            f"{field} would repeat {length} characters in each of {num_choices} choices, but an answer repeats at most "
            f"{MAX_REPEATED} characters of its prompts",
            field,
        )


def _count(text: bytes) -> tuple[int, int]:
    """Return the numbers of lists and objects, and of values, in a JSON text without strings."""
    return len(text.translate(None, _NOT_OPENING)), len(text.translate(None, _NOT_COMMAS))


def _within(num_nested: int, num_values: int) -> bool:
    return num_nested <= MAX_NESTED and num_values <= MAX_VALUES

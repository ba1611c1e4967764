"""`TokenBytes`: the bytes that each token of a vocabulary stands for. Joined and decoded as UTF-8, they are the text.

The library decodes a whole list of tokens, but in a stream they come one by one. The decoders of language models decode
each token independently of the others, with three exceptions, which this module handles:
- The bytes of one character may be in several tokens. Byte-level BPE writes each byte as a printable character,
  SentencePiece a single byte as '<0xE2>'. So a token stands for bytes, not for text.
- The first token of a text may be decoded differently: WordPiece and Metaspace put no space before it.
- Characters may be stripped from the start of the text, such as the space that SentencePiece puts before every word.
"""

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import tokenizers

DecoderStep: TypeAlias = Callable[[str, bool], str]
"""Transforms the text of a token. The second argument is true for the first token of a text."""

_HEX = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_TOKENS = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}


class TokenBytes:
    """The bytes of tokens: `first(id)` of the first token of a text, `later[id]` of any other.

    Up to `max_stripped` characters are stripped from the start of the text, see `strip`.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.later: Mapping[int, bytes] = _Cache(lambda id: self._compute(id, at_start=False) or b"")
        self.max_stripped = 0
        self._stripped = ""
        self._id_to_token = backend.id_to_token
        self._steps: list[DecoderStep] = [] if backend.decoder is not None else [_add_space]
        self._to_bytes: Callable[[str], bytes] = str.encode
        joined = False  # whether the decoders so far have joined all tokens to one text
        for part in _parts(backend):
            joined = joined or part["type"] in ("ByteLevel", "Fuse")
            if part["type"] in _TO_BYTES:
                self._to_bytes = _TO_BYTES[part["type"]]
            elif part["type"] == "Strip" and joined:
                self._stripped, self.max_stripped = part["content"], part["start"]
            elif part["type"] != "Fuse":
                self._steps.append(_step(part))

    def first(self, id: int) -> bytes | None:
        """Return the bytes of the first token of a text, before stripping; None if there is no such id."""
        return self._compute(id, at_start=True)

    def strip(self, text: str, limit: int) -> tuple[str, int]:
        """Strip up to `limit` characters from the start of a text. Return the rest and the remaining limit."""
        return _strip_start(text, self._stripped, limit)

    def _compute(self, id: int, at_start: bool) -> bytes | None:
        token = self._id_to_token(id)
        if token is None:
            return None
        for step in self._steps:
            token = step(token, at_start)
        return self._to_bytes(token)


def decode_utf8(data: bytes) -> tuple[str, bytes]:
    """Decode `data`. Return the text and the bytes at the end that begin an incomplete character.

    Invalid bytes become U+FFFD, as Unicode recommends: one for as many bytes as begin a character, else one per byte.
    """
    text, used = utf_8_decode(data, "replace", False)
    rest = data[used:]
    if b"\xed\x9f" < rest < b"\xee":  # Python takes half of a surrogate pair for an incomplete character
        return text + "\ufffd\ufffd", b""
    return text, rest


class _Cache(dict[int, bytes]):
    """Caches the results of `compute`."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        self._compute = compute

    def __missing__(self, id: int) -> bytes:
        data = self[id] = self._compute(id)
        return data


def _parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the settings of the tokenizer's decoders, in the order in which they run."""
    return list(_flatten(json.loads(backend.decoder.__getstate__()))) if backend.decoder is not None else []


def _flatten(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for part in decoder.get("decoders", []):
        yield from _flatten(part)


def _step(part: dict[str, Any]) -> DecoderStep:
    """Return the transformation of a token by one of the library's decoders.

    A decoder after `Fuse` gets the whole text in the library, but single tokens here.
    """
    if part["type"] == "Strip":  # the library's own panics if a token is shorter than the limit
        return lambda token, _: _strip_both(token, part["content"], part["start"], part["stop"])
    decoder = tokenizers.Tokenizer.from_str(json.dumps(_NO_TOKENS | {"decoder": part})).decoder
    return lambda token, at_start: str(decoder.decode([token] if at_start else ["", token]))


def _add_space(token: str, at_start: bool) -> str:
    """Transform a token as the library does if there is no decoder: put spaces between tokens."""
    return token if at_start else " " + token


def _strip_both(token: str, character: str, start: int, stop: int) -> str:
    rest, _ = _strip_start(token, character, start)
    return _strip_start(rest[::-1], character, stop)[0][::-1]


def _strip_start(text: str, character: str, limit: int) -> tuple[str, int]:
    cut = min(len(text) - len(text.lstrip(character)), limit)
    return text[cut:], limit - cut if cut == len(text) else 0


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable bytes are themselves, the others the characters from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()


def _byte_fallback(token: str) -> bytes:
    match = _HEX.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


_TO_BYTES = {"ByteLevel": _byte_level, "ByteFallback": _byte_fallback}

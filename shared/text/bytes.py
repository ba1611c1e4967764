"""`TokenBytes`: the bytes that each token of a vocabulary stands for. Joined and read as UTF-8, they are the text.

The library decodes a whole list of tokens, but a stream has them one by one. The decoders that language models use
read each token alone, apart from three things, which are kept apart here:
- The bytes of one character may lie in several tokens. Byte-level BPE writes each byte as a printable character,
  SentencePiece a lone byte as '<0xE2>'; so a token stands for bytes, not for text.
- The first token may read differently: WordPiece and Metaspace put no space in front of it.
- Characters may go from the start of the text, as the space that SentencePiece puts in front of every word.
"""

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import tokenizers

Step: TypeAlias = Callable[[str, bool], str]
"""Return what a token becomes. The second argument says whether it is the first one of its text."""

_HEX = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_TOKENS = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}


class TokenBytes:
    """`later[id]` are the bytes of a token that another one comes before, `first(id)` those of a text's first token.

    Up to `most_stripped` characters are left out at the start of the text, see `strip`.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.later: Mapping[int, bytes] = _Cache(lambda id: self._find(id, at_start=False) or b"")
        self.most_stripped = 0
        self._stripped = ""
        self._name = backend.id_to_token
        self._steps: list[Step] = [] if backend.decoder is not None else [_spaced]
        self._to_bytes: Callable[[str], bytes] = str.encode
        joined = False  # whether the decoder has made one text of all tokens
        for part in _parts(backend):
            joined = joined or part["type"] in ("ByteLevel", "Fuse")
            if part["type"] in _TO_BYTES:
                self._to_bytes = _TO_BYTES[part["type"]]
            elif part["type"] == "Strip" and joined:
                self._stripped, self.most_stripped = part["content"], part["start"]
            elif part["type"] != "Fuse":
                self._steps.append(_step(part))

    def first(self, id: int) -> bytes | None:
        """Return the bytes of a token that no other one comes before, nothing stripped; None if there is no such id."""
        return self._find(id, at_start=True)

    def strip(self, text: str, most: int) -> tuple[str, int]:
        """Return the start of a text without up to `most` characters, and how many may go from what comes behind it."""
        return _strip_start(text, self._stripped, most)

    def _find(self, id: int, at_start: bool) -> bytes | None:
        token = self._name(id)
        if token is None:
            return None
        for step in self._steps:
            token = step(token, at_start)
        return self._to_bytes(token)


def read_text(data: bytes) -> tuple[str, bytes]:
    """Return the text of `data`, U+FFFD for what is none, without the beginning of a character at its end: those bytes.

    Bytes are replaced as Unicode recommends: as many at once as begin a character, else each one.
    """
    text, used = utf_8_decode(data, "replace", False)
    rest = data[used:]
    if b"\xed\x9f" < rest < b"\xee":  # Python waits here for half of a surrogate pair
        return text + "\ufffd\ufffd", b""
    return text, rest


class _Cache(dict[int, bytes]):
    """Keeps what `find` returned for each id that was ever asked for."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        self._find = find

    def __missing__(self, id: int) -> bytes:
        found = self[id] = self._find(id)
        return found


def _parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the settings of the tokenizer's decoders in the order in which they run."""
    return list(_flat(json.loads(backend.decoder.__getstate__()))) if backend.decoder is not None else []


def _flat(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for part in decoder.get("decoders", []):
        yield from _flat(part)


def _step(part: dict[str, Any]) -> Step:
    """Return what one of the library's decoders does to a token.

    One that comes behind `Fuse` would see the whole text there; here it sees each token alone, like the others.
    """
    if part["type"] == "Strip":  # the library's panics at a token that is shorter than what may go
        return lambda token, _: _strip_both(token, part["content"], part["start"], part["stop"])
    decoder = tokenizers.Tokenizer.from_str(json.dumps(_NO_TOKENS | {"decoder": part})).decoder
    return lambda token, at_start: str(decoder.decode([token] if at_start else ["", token]))


def _spaced(token: str, at_start: bool) -> str:
    """Return what the library makes of a token where it has no decoder."""
    return token if at_start else " " + token


def _strip_both(token: str, character: str, start: int, stop: int) -> str:
    rest, _ = _strip_start(token, character, start)
    return _strip_start(rest[::-1], character, stop)[0][::-1]


def _strip_start(text: str, character: str, most: int) -> tuple[str, int]:
    cut = min(len(text) - len(text.lstrip(character)), most)
    return text[cut:], most - cut if cut == len(text) else 0


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for 256 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()


def _byte_fallback(token: str) -> bytes:
    lone = _HEX.fullmatch(token)
    return bytes([int(lone[1], 16)]) if lone else token.encode()


_TO_BYTES = {"ByteLevel": _byte_level, "ByteFallback": _byte_fallback}

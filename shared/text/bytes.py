"""Which bytes a vocabulary entry stands for, told from the kind of decoder that the tokenizer has.

Byte-level BPE writes each byte as a printable character; SentencePiece writes a space as '▁' and lone bytes as
'<0xE2>'; WordPiece marks what continues a word by '##'. Everything else is taken as it is written.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

_HEX = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_decoder(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """A function from a token, as written in the vocabulary, to its bytes."""
    kinds = {str(part.get("type")) for part in _parts(json.loads(backend.to_str()).get("decoder") or {})}
    if "ByteLevel" in kinds:
        return _byte_level
    if "WordPiece" in kinds:
        return _word_piece
    return _sentence_piece if kinds & {"ByteFallback", "Metaspace", "Replace"} else str.encode


def _parts(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield decoder
    for part in decoder.get("decoders", []):
        yield from _parts(part)


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


def _sentence_piece(token: str) -> bytes:
    lone = _HEX.fullmatch(token)
    return bytes([int(lone[1], 16)]) if lone else token.replace("▁", " ").encode()


def _word_piece(token: str) -> bytes:
    return token[2:].encode() if token.startswith("##") else b" " + token.encode()

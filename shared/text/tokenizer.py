"""`Tokenizer`: a model folder's tokenizer, using the `tokenizers` library.

It encodes and decodes, and knows which tokens are special and which end a sequence. tokenizer.json is read directly, in
milliseconds, and the tokens of the other files are added to it. If a folder has none, or another file contradicts it,
transformers makes the fast tokenizer once. The result is kept in the cache folder, under a digest of the files that it
was made from.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from shared.errors import InvalidRequest, ModelError
from shared.gguf.folder import read_pointer
from shared.hub.checkpoint import cache_folder
from shared.text.added_tokens import add_tokens, disagrees_on_prefix_space, special_tokens
from shared.text.cut_text import CutText
from shared.text.json_file import as_integer, read_json
from shared.text.token_bytes import TokenBytes, decode_utf8

logger = logging.getLogger(__name__)

VOCABULARY_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")
"""Patterns of the files from which a tokenizer can be made."""

CONVERSION_FILES = ("*.json", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Patterns of the files that transformers reads to make a tokenizer."""

MAX_JOINED = 50_000
"""Tokens whose bytes are joined in one call, which holds the interpreter: that takes a few milliseconds."""

MAX_SHRINKAGE = 4
"""How many times shorter a normalizer may make a text."""


CUT_MARGIN = 64
"""Tokens beyond those that are kept of a text, so that a cut in front of them does not change how those are made."""


class Tokenizer:
    """Converts text to token ids and back. `special` has special tokens by their names in templates (`eos_token`)."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, special: Mapping[str, str] = {}, eos_token_ids: Iterable[int] = ()
    ) -> None:
        backend.no_truncation()  # tokenizer.json may have the settings used in training
        backend.no_padding()
        self.backend = backend
        self.special = dict(special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocabulary)
        self._max_token_length = max(map(len, vocabulary), default=1)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {id: token.content for id, token in added.items()}
        self._special_tokens = {id: token.content for id, token in added.items() if token.special}
        self.special_ids = frozenset(self._special_tokens)
        self.bytes = TokenBytes(backend)

    @classmethod
    def load(cls, folder: Path, model: Path | None = None) -> "Tokenizer":
        """Return the tokenizer in `folder`. `model` is the model's folder if that is another one.

        The tokens that end a sequence are the model's. Raise `ModelError` if a file is missing or broken, or if the
        tokenizer has tokens that the model does not have.
        """
        check_tokenizer_files(folder)
        backend = _load_backend(folder, _model_vocab_size(model or folder))
        if model is not None:
            _check_fits(backend, folder, model)
        special = special_tokens(folder)
        return cls(backend, special=special, eos_token_ids=_eos_token_ids(model or folder, backend, special))

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.special["bos_token"]) if "bos_token" in self.special else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with special tokens such as BOS if `add_special_tokens`."""
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text. Other threads can run meanwhile. Raise `InvalidRequest`."""
        return [encoding.ids for encoding in self._encode_batch(texts, add_special_tokens)]

    def _encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        if any(isinstance(text, CutText) and text.cuts for text in texts):
            return [self._encode_pieces(text, add_special_tokens) for text in texts]
        try:
            encodings: list[tokenizers.Encoding] = self.backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except TypeError as error:  # raised by the library for a lone surrogate
            raise InvalidRequest("the text holds half of a surrogate pair, which is not a character") from error
        return encodings

    def encode_part(
        self, text: str, max_tokens: int, *, keep_start: bool = False, add_special_tokens: bool = True
    ) -> tuple[list[int], bool]:
        """Return the last token ids of a text, or the first ones if `keep_start`, and whether any were dropped.

        They are at most `max_tokens`, those included that `add_special_tokens` adds, which are kept if they fit. Of a
        text that is certainly much longer, the part that matters is encoded. Raise `InvalidRequest`.
        """
        enough = self.max_characters(max_tokens + CUT_MARGIN)
        part = text[:enough] if keep_start else text[-enough:]
        (encoding,) = self._encode_batch([part], add_special_tokens)
        ids: list[int] = encoding.ids
        if len(ids) <= max_tokens:
            return ids, len(part) < len(text)
        content = [index for index, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
        start, end = (content[0], content[-1] + 1) if content else (0, 0)
        num_kept = max_tokens - start - (len(ids) - end)
        if num_kept <= 0:
            return (ids[:max_tokens] if keep_start else ids[-max_tokens:]), True
        kept = ids[start : start + num_kept] if keep_start else ids[end - num_kept : end]
        return ids[:start] + kept + ids[end:], True

    def _encode_pieces(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encode a text piece by piece. What goes before a text, such as BOS, goes before the first piece."""
        first, *others = text.pieces if isinstance(text, CutText) else [text]
        encodings = self._encode_batch([first], add_special_tokens) + self._encode_batch(others, False)
        return tokenizers.Encoding.merge(encodings)

    def token_offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the number of characters of `text` before each token. A space belongs to the token after it."""
        offsets: list[int] = []
        end = 0
        for start, stop in self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].offsets:
            offsets.append(min(start, end) if start < stop else end)  # an added token, such as BOS, is not in the text
            end = max(end, stop)
        return offsets

    def max_characters(self, tokens: int) -> int:
        """Return the number of characters above which a text is assumed to have more than `tokens` tokens.

        No token has more characters than the longest one. `MAX_SHRINKAGE` allows for normalizers that shorten a text,
        such as one that joins runs of spaces. (One that joins runs of any length could exceed it.)
        """
        return tokens * self._max_token_length * MAX_SHRINKAGE

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, *, final: bool = True) -> str:
        """Return the text of `ids`. Ids that the tokenizer does not have (padding of the vocabulary) are skipped.

        Invalid bytes become U+FFFD, as Unicode recommends. Unless `final`, an incomplete character at the end is left
        out. For valid text the result is that of the library's `decode`.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        shown = (id for id in ids if id not in hidden)
        first = next((data for id in shown if (data := self.bytes.first(id)) is not None), b"")
        parts = [first]
        while piece := [self.bytes.later[id] for id in islice(shown, MAX_JOINED)]:
            parts.append(b"".join(piece))
        text, rest = decode_utf8(b"".join(parts))
        text += rest.decode(errors="replace") if final else ""
        return self.bytes.strip(text, self.bytes.max_stripped)[0]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, spelled as in the vocabulary; None if there is no such token."""
        return self.backend.token_to_id(token)

    def token(self, id: int) -> str:
        """Return a token as the vocabulary spells it; '' if the tokenizer does not have the id."""
        return self.backend.id_to_token(id) or ""

    @property
    def special_names(self) -> list[str]:
        """Return the texts of all special tokens."""
        return list(self._special_tokens.values())

    def special_token(self, id: int) -> str | None:
        """Return the text of a special token; None if the token is not special."""
        return self._special_tokens.get(id)

    def token_bytes(self, id: int, at_start: bool = False) -> bytes:
        """Return the bytes that a token adds to a text, which may be part of a character.

        A special token's bytes are those of its text. `at_start`: the token is the first of its text.
        """
        if not at_start:
            return self.bytes.later[id]
        first = self.bytes.first(id) or b""
        try:
            return self.bytes.strip(first.decode(), self.bytes.max_stripped)[0].encode()
        except UnicodeDecodeError:
            return first

    def token_text(self, id: int, at_start: bool = False) -> str:
        r"""Return one token for display: its text, or `bytes:\xf0\x9f` if it is not whole characters."""
        raw = self.token_bytes(id, at_start)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def check_tokenizer_files(folder: Path) -> None:
    """Raise `ModelError` if a model folder has no file from which a tokenizer can be made."""
    if (pointer := read_pointer(folder)) and pointer.no_tokenizer:
        raise ModelError(pointer.no_tokenizer)
    if not any(path for pattern in VOCABULARY_FILES for path in folder.glob(pattern)):
        raise ModelError(f"{folder} has no tokenizer; none of {', '.join(VOCABULARY_FILES)} is there")


def _check_fits(backend: tokenizers.Tokenizer, folder: Path, model: Path) -> None:
    """Raise `ModelError` if the tokenizer has an id that the model does not have."""
    size = _model_vocab_size(model)
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if size is not None and highest >= size:
        raise ModelError(f"the tokenizer in {folder} has ids up to {highest}, but the model has only {size} tokens")


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: not a tokenizer: {error}") from error


def _load_backend(folder: Path, vocab_size: int | None) -> tokenizers.Tokenizer:
    """Return the library's tokenizer, as transformers would load it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert(folder, "there is no tokenizer.json")
    backend = _read(path)
    if disagrees_on_prefix_space(backend, folder):
        try:
            return _convert(folder, "tokenizer_config.json and tokenizer.json differ in add_prefix_space")
        except ModelError as error:
            logger.warning("%s; tokenizer.json is used as it is", error)
    add_tokens(backend, folder, vocab_size)
    backend.encode_special_tokens = read_json(folder / "tokenizer_config.json").get("split_special_tokens") is True
    return backend


def _convert(folder: Path, reason: str) -> tokenizers.Tokenizer:
    """Return the tokenizer that transformers makes, from the cache if it was made before."""
    cached = cache_folder() / "tokenizers" / f"{_digest(folder)}.json"
    if cached.is_file():
        return _read(cached)
    logger.info("%s: %s; transformers converts the tokenizer, once", folder, reason)
    backend = _convert_with_transformers(folder, reason)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(".partial")
        partial.write_text(backend.to_str(), encoding="utf-8")  # `save` raises no OSError on a full disk
        partial.replace(cached)
    except OSError as error:
        logger.warning(
            "cannot keep the tokenizer in %s (%s); it is converted again at each start", cached.parent, error
        )
    return backend


def _convert_with_transformers(folder: Path, reason: str) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer  # imported here since it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), use_fast=True, trust_remote_code=False)
    except Exception as error:  # tokenizer classes raise exceptions of all types
        raise ModelError(f"{folder}: {reason}, and transformers cannot make the tokenizer: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{folder}: {reason}, and its {type(tokenizer).__name__} has no fast form")
    return backend


def _digest(folder: Path) -> str:
    digest = hashlib.sha256(version("transformers").encode())
    for path in sorted({path for pattern in CONVERSION_FILES for path in folder.glob(pattern)}):
        if not path.is_file():
            raise ModelError(f"{path} is no file")  # a pipe would be waited for
        if path.stat().st_size < 64 * 1024 * 1024:  # smaller than weights; index files of weights may be included
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> list[int]:
    """Return the tokenizer's eos_token, and the ids in generation_config.json, or else those in config.json."""
    size = _model_vocab_size(folder)
    if size is None:
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    ids = [] if own is None else _below_vocab_size([own], size, folder / "tokenizer.json")
    for path, read in (
        (folder / "generation_config.json", _read_generation_config),
        (folder / "config.json", read_json),
    ):
        value = read(path).get("eos_token_id")
        if named := _below_vocab_size(value if isinstance(value, list) else [value], size, path):
            return ids + named
    return ids


def _model_vocab_size(folder: Path) -> int | None:
    """Return vocab_size of config.json or its text_config. With padding it exceeds the tokenizer's."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def _read_generation_config(path: Path) -> dict[str, Any]:
    """Return what `read_json` does, but {} for a broken file, which is not the user's fault."""
    try:
        return read_json(path)
    except ModelError as error:
        logger.warning("%s; its eos_token_id is not used", error)
        return {}


def _below_vocab_size(values: Sequence[Any], size: int, path: Path) -> list[int]:
    """Return the ids that the model can sample, and log the others: an engine refuses a request with such an id."""
    ids = {index: as_integer(value) for index, value in enumerate(values) if value is not None}
    inside = {index: id for index, id in ids.items() if id is not None and 0 <= id < size}
    if outside := [values[index] for index in ids if index not in inside]:
        logger.warning("%s: eos_token_id %.200s is ignored: the model has %d tokens", path, outside, size)
    return list(inside.values())

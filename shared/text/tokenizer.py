"""`Tokenizer`: a model folder's tokenizer, over the `tokenizers` library.

Owns what the folder's files say of tokens: ids to text and back, which tokens are special, and which end a sequence.
tokenizer.json is read directly, in milliseconds, and what the files beside it say of tokens is added to it. A folder
without one, or with one that another file contradicts, has its fast tokenizer made by transformers, once; the result is
kept in the cache folder under a digest of the files it was made from.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers

from shared.errors import InvalidRequest, ModelError
from shared.gguf.folder import read_pointer
from shared.hub.checkpoint import cache_folder
from shared.text.added_tokens import add_tokens, disagrees_on_prefix_space, special_tokens
from shared.text.bytes import TokenBytes, read_text
from shared.text.json_file import read_json, whole_number

logger = logging.getLogger(__name__)

VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")
SHRINKING = 4
SOURCES = ("*.json", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")


class Tokenizer:
    """Text to token ids and back. `special` names the special tokens as chat templates do (`eos_token`, ...)."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, special: Mapping[str, str] = {}, eos_token_ids: Iterable[int] = ()
    ) -> None:
        backend.no_truncation()  # tokenizer.json may carry the settings of its training
        backend.no_padding()
        self.backend = backend
        self.special = dict(special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocabulary)
        self._longest = max(map(len, vocabulary), default=1)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._special_tokens = {
            id: token.content for id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self.special_ids = frozenset(self._special_tokens)
        self.bytes = TokenBytes(backend)

    @classmethod
    def load(cls, folder: Path, model: Path | None = None) -> "Tokenizer":
        """The tokenizer in `folder`, which may be another one than the model's, `model`.

        What ends a sequence is then the model's to say. Raises `ModelError` naming the file that is missing or broken,
        and for tokens that the model does not have.
        """
        check_there(folder)
        backend = _load_backend(folder, _model_vocab_size(model or folder))
        if model is not None:
            _check_fits(backend, folder, model)
        special = special_tokens(folder)
        return cls(backend, special=special, eos_token_ids=_eos_token_ids(model or folder, backend, special))

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.special["bos_token"]) if "bos_token" in self.special else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokenizer's own BOS and the like if `add_special_tokens`."""
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each of the texts. Meanwhile other threads run: unlike `encode`, the batch form lets them."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:  # what the library makes of a lone surrogate
            raise InvalidRequest("the text holds half of a surrogate pair, which is not a character") from error
        return [encoding.ids for encoding in encodings]

    def token_offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the characters of `text` before each token of `encode`; a space belongs to the token behind it."""
        offsets: list[int] = []
        end = 0
        for start, stop in self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].offsets:
            offsets.append(min(start, end) if start < stop else end)  # what was added to the text has no place in it
            end = max(end, stop)
        return offsets

    def most_characters(self, tokens: int) -> int:
        """More characters than these are taken to be more than so many tokens, without tokenizing them.

        A token stands for at most the characters of the longest; `SHRINKING` allows for normalizers that shorten a
        text, as by joining runs of spaces. (One that joins runs of any length could make less of a text yet.)
        """
        return tokens * self._longest * SHRINKING

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, *, final: bool = True) -> str:
        """Return the text of `ids`; ids that the tokenizer does not have (of a padded vocabulary) are nothing.

        Bytes that are no character become U+FFFD, as Unicode recommends; unless `final`, the beginning of a character
        at the end is left out instead. For valid text this is what the library's `decode` returns.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        shown = (id for id in ids if id not in hidden)
        first = next((found for id in shown if (found := self.bytes.first(id)) is not None), b"")
        text, rest = read_text(first + b"".join([self.bytes.later[id] for id in shown]))
        text += rest.decode(errors="replace") if final else ""
        return self.bytes.strip(text, self.bytes.most_stripped)[0]

    def token_id(self, token: str) -> int | None:
        """The id of a token written as in the vocabulary."""
        return self.backend.token_to_id(token)

    def special_text(self, id: int) -> str | None:
        """The name of a special token; None if it is an ordinary one."""
        return self._special_tokens.get(id)

    def token_bytes(self, id: int, at_start: bool = False) -> bytes:
        """Return the bytes that a token adds to a text, perhaps part of a character; a special token's are its name's.

        `at_start` asks for those of a text's first token.
        """
        if not at_start:
            return self.bytes.later[id]
        first = self.bytes.first(id) or b""
        try:
            return self.bytes.strip(first.decode(), self.bytes.most_stripped)[0].encode()
        except UnicodeDecodeError:
            return first

    def token_text(self, id: int, at_start: bool = False) -> str:
        r"""Return one token for people: its text, or `bytes:\xf0\x9f` where it is no whole characters."""
        raw = self.token_bytes(id, at_start)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def check_there(folder: Path) -> None:
    """Raises `ModelError` if a model folder has nothing that a tokenizer could be made of."""
    if (pointer := read_pointer(folder)) and pointer.no_tokenizer:
        raise ModelError(pointer.no_tokenizer)
    if not any(path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        raise ModelError(f"{folder} has no tokenizer; none of {', '.join(VOCABULARIES)} is there")


def _check_fits(backend: tokenizers.Tokenizer, folder: Path, model: Path) -> None:
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
    """The library's tokenizer, as transformers would have it."""
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
    cached = cache_folder() / "tokenizers" / f"{_digest(folder)}.json"
    if cached.is_file():
        return _read(cached)
    logger.info("%s: %s; transformers makes the tokenizer, once", folder, reason)
    backend = _convert_with_transformers(folder, reason)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(".partial")
        partial.write_text(backend.to_str(), encoding="utf-8")  # `save` raises no OSError on a full disk
        partial.replace(cached)
    except OSError as error:
        logger.warning("cannot keep the tokenizer in %s (%s); it is made anew at each start", cached.parent, error)
    return backend


def _convert_with_transformers(folder: Path, reason: str) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer  # takes seconds, so only here

    try:
        made = AutoTokenizer.from_pretrained(str(folder), use_fast=True, trust_remote_code=False)
    except Exception as error:  # each class of tokenizers raises what it likes
        raise ModelError(f"{folder}: {reason}, and transformers cannot make the tokenizer: {error}") from error
    backend = getattr(made, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{folder}: {reason}, and its {type(made).__name__} has no fast form")
    return backend


def _digest(folder: Path) -> str:
    digest = hashlib.sha256(version("transformers").encode())
    for path in sorted({path for pattern in SOURCES for path in folder.glob(pattern)}):
        if path.stat().st_size < 64 * 1024 * 1024:  # indices of weights and the like are small, tokenizers too
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> list[int]:
    """The tokenizer's own, and those of generation_config.json, or of config.json where the former names none."""
    size = _model_vocab_size(folder)
    if size is None:
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    ids = [] if own is None else _inside([own], size, folder / "tokenizer.json")
    for path, read in (
        (folder / "generation_config.json", _read_generation_config),
        (folder / "config.json", read_json),
    ):
        found = read(path).get("eos_token_id")
        if named := _inside(found if isinstance(found, list) else [found], size, path):
            return ids + named
    return ids


def _model_vocab_size(folder: Path) -> int | None:
    """What config.json says, which may be more than the tokenizer has; of a model of many parts, its text part's."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def _read_generation_config(path: Path) -> dict[str, Any]:
    """Return what `read_json` does, or `{}` for a broken file: whoever serves the model did not write it."""
    try:
        return read_json(path)
    except ModelError as error:
        logger.warning("%s; no eos_token_id is taken from it", error)
        return {}


def _inside(given: Sequence[Any], size: int, path: Path) -> list[int]:
    """Those that the model can produce: it never ends with another, and an engine would refuse to wait for it."""
    ids = {at: whole_number(value) for at, value in enumerate(given) if value is not None}
    inside = {at: id for at, id in ids.items() if id is not None and 0 <= id < size}
    if outside := [given[at] for at in ids if at not in inside]:
        logger.warning("%s: eos_token_id %.200s is ignored: the model has %d tokens", path, outside, size)
    return list(inside.values())

"""Adds the tokens of the other tokenizer files to tokenizer.json's, as transformers' `AutoTokenizer` does.

tokenizer.json can lack tokens that the model was trained with: users add some, and older programs wrote them only to
tokenizer_config.json, special_tokens_map.json or added_tokens.json. Such a token gets its id in the vocabulary, or else
the next free id, in this order: the tokens of added_tokens_decoder (or, without it, of added_tokens.json) by their ids,
the named tokens, such as eos_token, and the extra special tokens. If there is an added_tokens_decoder, no tokens are
read from the two older files, special_tokens_map.json and added_tokens.json.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from shared.text.json_file import as_integer, read_json

logger = logging.getLogger(__name__)

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens by their names in chat templates, such as eos_token."""
    config, older = _config(folder), read_json(folder / "special_tokens_map.json")
    named = {name: _parse_token((older | config).get(name)) for name in TOKEN_NAMES}
    return {name: token.content for name, token in named.items() if token is not None}


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, vocab_size: int | None) -> None:
    """Add the tokens of the other tokenizer files to `backend`.

    A token whose id would not be below `vocab_size` is left out and logged, since the model has no embedding for it.
    """
    config = _config(folder)
    present = backend.get_added_tokens_decoder()
    named = list(_named_tokens(config).values())
    new = {token.content: token for token in _tokens_with_ids(config, folder, present)}
    contents = new.keys() | {token.content for token in present.values()}
    new |= {token.content: token for token in (*named, *_extra_tokens(config)) if token.content not in contents}
    special = {token.content for token in named} | {token.content for token in present.values() if token.special}
    for token in new.values():
        token.special = token.special or token.content in special  # for the library too, a special token stays special
    backend.add_tokens(_below_vocab_size(list(new.values()), backend, vocab_size, folder))


def _config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with special_tokens_map.json over it if there is no added_tokens_decoder."""
    config = read_json(folder / "tokenizer_config.json")
    if isinstance(config.get("added_tokens_decoder"), dict):
        return config
    older = read_json(folder / "special_tokens_map.json")
    if _extra_tokens(config) and not _names_extra_tokens(config):
        older.pop("additional_special_tokens", None)
    return config | older


def _names_extra_tokens(config: Mapping[str, Any]) -> bool:
    """Return whether extra_special_tokens, which replaces additional_special_tokens, gives each token a name."""
    return isinstance(config.get("extra_special_tokens"), dict) and bool(config["extra_special_tokens"])


def _tokens_with_ids(config: Mapping[str, Any], folder: Path, present: Mapping[int, AddedToken]) -> list[AddedToken]:
    """Return the tokens that the files list with ids, in the order of the ids, without those that are in `present`."""
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        numbered = {as_integer(id): _parse_token(value) for id, value in listed.items()}
    else:
        # without those of special_tokens_map.json, and those beside named ones: transformers reads them later
        extra = [] if _names_extra_tokens(config) else _extra_tokens(read_json(folder / "tokenizer_config.json"))
        special = {token.content for token in (*_named_tokens(config).values(), *extra)}
        older = read_json(folder / "added_tokens.json")
        numbered = {as_integer(id): AddedToken(text, special=text in special) for text, id in older.items()}
        numbered = {id: token for id, token in numbered.items() if id not in present}
    same = {repr(token) for token in present.values()}
    ordered = sorted((id, token) for id, token in numbered.items() if id is not None and token is not None)
    return [token for _, token in ordered if repr(token) not in same]


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return the special tokens that have a name: one of `TOKEN_NAMES`, or one of the model's own."""
    own = [name for name in config if name.endswith("_token") and name not in TOKEN_NAMES]
    extra = config.get("extra_special_tokens")
    values = {name: config.get(name) for name in (*TOKEN_NAMES, *own)} | (extra if isinstance(extra, dict) else {})
    tokens = {name: _parse_token(value) for name, value in values.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def _extra_tokens(config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens without a name: of extra_special_tokens, or else of additional_special_tokens."""
    values = config.get("extra_special_tokens")
    if not isinstance(values, list) or not values:
        values = config.get("additional_special_tokens")
    tokens = [_parse_token(value) for value in values] if isinstance(values, list) else []
    return [token for token in tokens if token is not None]


def _parse_token(value: Any) -> AddedToken | None:
    """Return a token, which is special if `value` is a string; None if `value` is not a token."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str) or not value["content"]:
        return None
    return AddedToken(
        value["content"], **{flag: value[flag] for flag in TOKEN_FLAGS if isinstance(value.get(flag), bool)}
    )


def _below_vocab_size(
    tokens: list[AddedToken], backend: tokenizers.Tokenizer, vocab_size: int | None, folder: Path
) -> list[AddedToken]:
    """Return the tokens whose ids are below `vocab_size`, and log the others."""
    new = [token for token in tokens if backend.token_to_id(token.content) is None]
    if not new or vocab_size is None:
        return tokens
    room = vocab_size - 1 - max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    outside = [token.content for token in new[max(room, 0) :]]
    if outside:
        logger.warning("%s: tokens %.200s are left out: the model has only %d", folder, outside, vocab_size)
    return [token for token in tokens if token.content not in outside]


def disagrees_on_prefix_space(backend: tokenizers.Tokenizer, folder: Path) -> bool:
    """Return whether tokenizer_config.json and tokenizer.json disagree on putting a space before a text.

    For a missing add_prefix_space, most classes of byte-level tokenizers put none. Only transformers knows the class.
    """
    parts = [part for part in (backend.normalizer, backend.pre_tokenizer) if part is not None]
    adds_space = [entry for part in parts for entry in _prefix_spaces(json.loads(part.__getstate__()))]
    setting = read_json(folder / "tokenizer_config.json").get("add_prefix_space")
    if setting is None:
        return ("ByteLevel", True) in adds_space
    return bool(adds_space) and any(adds for _, adds in adds_space) != setting


def _prefix_spaces(part: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the type of each part of a tokenizer that can put a space before a text, and whether it does."""
    match part.get("type"):
        case "Sequence":
            for inner_part in part.get("pretokenizers") or part.get("normalizers") or ():
                yield from _prefix_spaces(inner_part)
        case "ByteLevel" if "add_prefix_space" in part:
            yield "ByteLevel", part["add_prefix_space"]
        case "Metaspace":
            yield "Metaspace", part.get("prepend_scheme") != "never"
        case "Prepend":
            yield "Prepend", True

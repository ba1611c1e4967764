"""Builds tokenizer.json and tokenizer_config.json from a GGUF file's vocabulary.

There are two types of vocabularies. `gpt2` is byte-level BPE with its merges and the name of a pre-tokenizer. `llama`
is a SentencePiece BPE model, whose merges follow from the scores of its pieces. If the result would not give the
same ids as the original for every text, `Unconvertible` says why, and the user must name another tokenizer.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, Keys, TokenType
from msgspec import ValidationError, convert
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shared.errors import ModelError
from shared.gguf.header import Header
from shared.gguf.pre_tokenizers import SUPPORTED, find_byte_level_config

logger = logging.getLogger(__name__)

Metadata = Mapping[str, Any]

SPECIAL = {
    "bos_token": Keys.Tokenizer.BOS_ID,
    "eos_token": Keys.Tokenizer.EOS_ID,
    "unk_token": Keys.Tokenizer.UNK_ID,
    "pad_token": Keys.Tokenizer.PAD_ID,
}
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end an answer in a chat. Files often name only one end token, maybe that of documents."""

SPACE_PIECE, SPACE = "▁", " "

INSTRUCTION = "[INST]"
"""A control token of Mistral since version 3. These models add no space to text after a special token."""

VALUE_TYPES: dict[str, Any] = {
    Keys.Tokenizer.MODEL: str,
    Keys.Tokenizer.PRE: str,
    Keys.Tokenizer.LIST: list[str],
    Keys.Tokenizer.TOKEN_TYPE: list[int],
    Keys.Tokenizer.SCORES: list[float],
    Keys.Tokenizer.MERGES: list[str],
    Keys.Tokenizer.ADD_BOS: bool,
    Keys.Tokenizer.ADD_EOS: bool,
    Keys.Tokenizer.ADD_PREFIX: bool,
    Keys.Tokenizer.CHAT_TEMPLATE: str,
    Keys.Tokenizer.EOT_ID: int,
    Keys.Tokenizer.EOM_ID: int,
    **dict.fromkeys(SPECIAL.values(), int),
}


def check_types(header: Header) -> None:
    """Raise `ModelError` if a value of the vocabulary has a wrong type."""
    for key, type in VALUE_TYPES.items():
        if key in header.metadata:
            try:
                convert(header.metadata[key], type)
            except ValidationError as error:
                raise ModelError(f"{header.paths[0]}: {key}: {error}") from error


class Unconvertible(Exception):
    """Raised, with the reason, if no tokenizer can be made from a file."""


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return the file's tokenizer. Raise `Unconvertible` if it cannot be made."""
    model = metadata.get(Keys.Tokenizer.MODEL)
    tokens = metadata.get(Keys.Tokenizer.LIST) or []
    if len(set(tokens)) != len(tokens):
        raise Unconvertible("its vocabulary has a token twice")
    for key in SPECIAL.values():
        if not 0 <= metadata.get(key, 0) < max(len(tokens), 1):
            raise Unconvertible(f"{key} is {metadata[key]}, and it has {len(tokens)} tokens")
    try:
        return _build(model, metadata, tokens)
    except Unconvertible:
        raise
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())  # some of its messages have several lines
        raise Unconvertible(f"its vocabulary is damaged: {reason}") from error


def _build(model: Any, metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    if not tokens:
        raise Unconvertible(f"{Keys.Tokenizer.LIST} is missing or empty")
    if (types := len(metadata.get(Keys.Tokenizer.TOKEN_TYPE) or [])) != len(tokens):
        raise Unconvertible(f"{Keys.Tokenizer.TOKEN_TYPE} has {types} types, and there are {len(tokens)} tokens")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, tokens)
    elif model == "llama":
        tokenizer, adds_bos = _sentence_piece(metadata, tokens), True
    else:
        raise Unconvertible(f"{Keys.Tokenizer.MODEL} {model!r} is not known here (known: gpt2, llama)")
    _add_tokens(tokenizer, metadata, tokens)
    _add_post_processor(tokenizer, metadata, tokens, adds_bos)
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Return tokenizer_config.json: the chat template, and the special tokens by their roles."""
    tokens = metadata.get(Keys.Tokenizer.LIST) or []
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, key in SPECIAL.items():
        if (id := metadata.get(key)) is not None and 0 <= id < len(tokens):
            config[role] = tokens[id]
    if template := metadata.get(Keys.Tokenizer.CHAT_TEMPLATE):
        config["chat_template"] = template
    return config


def end_token_ids(header: Header, vocab_size: int) -> list[int]:
    """Return the ids of end tokens: those that the file names, and `TURN_ENDS` in its vocabulary.

    Ids that the model does not have are left out, with a warning.
    """
    metadata = header.metadata
    tokens, types = metadata.get(Keys.Tokenizer.LIST) or [], metadata.get(Keys.Tokenizer.TOKEN_TYPE) or []
    named = []
    for key in (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID):
        if (id := metadata.get(key)) is not None and not 0 <= id < vocab_size:
            logger.warning("%s: %s %d is ignored: the model has %d tokens", header.paths[0], key, id, vocab_size)
        elif id is not None:
            named.append(id)
    turn_ends = [
        id
        for id, (token, type) in enumerate(zip(tokens, types, strict=False))
        if type == TokenType.CONTROL and token in TURN_ENDS
    ]
    return list(dict.fromkeys([*named, *turn_ends]))


def _byte_level(metadata: Metadata, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get(Keys.Tokenizer.PRE)
    config = find_byte_level_config(str(name))
    if config is None:
        raise Unconvertible(f"{Keys.Tokenizer.PRE} {name!r} is not known here (known: {', '.join(SUPPORTED)})")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = list(_listed_merges(metadata, vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=config.ignore_merges))
    if config.normalizer is not None:
        tokenizer.normalizer = config.normalizer
    tokenizer.pre_tokenizer = config.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, config.adds_bos


def _listed_merges(metadata: Metadata, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the merges that the file lists, each a pair of tokens that make a third one."""
    listed = metadata.get(Keys.Tokenizer.MERGES)
    if not listed:
        raise Unconvertible(f"{Keys.Tokenizer.MERGES} is missing or empty")
    for merge in listed:
        left, _, right = merge.partition(" ")
        if not (right and left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise Unconvertible(f"{Keys.Tokenizer.MERGES}: {merge!r} is not two tokens that make a third one")
        yield left, right


def _sentence_piece(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    for key in (Keys.Tokenizer.PRECOMPILED_CHARSMAP, Keys.Tokenizer.REMOVE_EXTRA_WS):
        if metadata.get(key):
            raise Unconvertible(f"{key} is not supported for a {Keys.Tokenizer.MODEL} of 'llama'")
    types, scores = metadata[Keys.Tokenizer.TOKEN_TYPE], metadata.get(Keys.Tokenizer.SCORES) or []
    if len(scores) != len(tokens):
        raise Unconvertible(f"{Keys.Tokenizer.SCORES} has {len(scores)} scores, and there are {len(tokens)} tokens")
    if not all(map(math.isfinite, scores)):
        raise Unconvertible(f"{Keys.Tokenizer.SCORES} has a score that is no finite number")
    unknown = metadata.get(Keys.Tokenizer.UNK_ID)
    model = models.BPE(
        vocab={token: id for id, token in enumerate(tokens)},
        merges=list(_merges_by_score(tokens, types, scores)),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(SPACE, SPACE_PIECE)
    decoding: list[Any] = [decoders.Replace(SPACE_PIECE, SPACE), decoders.ByteFallback(), decoders.Fuse()]
    adds_prefix = metadata.get(Keys.Tokenizer.ADD_PREFIX, True)
    if adds_prefix and INSTRUCTION in tokens and types[tokens.index(INSTRUCTION)] == TokenType.CONTROL:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_PIECE, prepend_scheme="first", split=False)
        decoding.append(decoders.Strip(SPACE, 1, 0))
    elif adds_prefix:  # a space goes in front of the text and of text after a special token
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_PIECE), spaces])
        decoding.append(decoders.Strip(SPACE, 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yield every pair of pieces that make an ordinary piece, best score first, as SentencePiece merges them."""
    pieces = {token: id for id, token in enumerate(tokens) if types[id] == TokenType.NORMAL}
    merges = []
    for piece, id in pieces.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                merges.append((-scores[id], id, pieces[left], pieces[right], left, right))
    for *_, left, right in sorted(merges):
        yield left, right


def _add_tokens(tokenizer: Tokenizer, metadata: Metadata, tokens: Sequence[str]) -> None:
    """Add the tokens that are matched literally in a text before it is split."""
    strips = _strips_right(metadata)
    special, ordinary = [], []
    for token, type in zip(tokens, metadata[Keys.Tokenizer.TOKEN_TYPE], strict=True):
        if type == TokenType.CONTROL:
            special.append(AddedToken(token, normalized=False, special=True, rstrip=strips(token)))
        elif type == TokenType.USER_DEFINED and token:
            ordinary.append(AddedToken(token, normalized=False, special=False, rstrip=strips(token)))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(ordinary)


def _strips_right(metadata: Metadata) -> Any:
    """Return a function that says if a token strips white space after it. No key has this: most tokens of Phi-3 do."""
    is_phi = metadata.get(Keys.General.ARCHITECTURE) == MODEL_ARCH_NAMES[MODEL_ARCH.PHI3]
    if is_phi and metadata.get(Keys.Tokenizer.MODEL) == "llama":
        return lambda token: token not in ("<unk>", "<s>", "<|endoftext|>")
    return lambda token: False


def _add_post_processor(tokenizer: Tokenizer, metadata: Metadata, tokens: Sequence[str], adds_bos: bool) -> None:
    """Make the tokenizer add BOS before and EOS after each text, as the file asks."""
    first, last = metadata.get(Keys.Tokenizer.BOS_ID), metadata.get(Keys.Tokenizer.EOS_ID)
    used = []
    if metadata.get(Keys.Tokenizer.ADD_BOS, adds_bos) and first is not None:
        used.append((tokens[first], first))
    before = [token for token, _ in used]
    after = []
    if metadata.get(Keys.Tokenizer.ADD_EOS, False) and last is not None:
        used.append((tokens[last], last))
        after = [tokens[last]]
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B:1"], special_tokens=used
        )

"""Pre-tokenizers of byte-level BPE (`tokenizer.ggml.pre`), which split text into words before merges within them.

A name stands for the tokenizer of one known model, which the converter to GGUF recognises by the ids of a sample text.
This module has the names whose original tokenizer.json is known for certain. A guess for other names could give a few
wrong ids that nobody notices.
"""

from typing import Any, NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SIGN = r"[^\r\n\p{L}\p{N}]?"  # a sign or space before a word

_LETTERS = rf"{_CONTRACTIONS}|{_SIGN}\p{{L}}+"
"""Words. A contraction such as 'll is a word of its own."""

_CASES = rf"{_SIGN}{_UPPER}*{_LOWER}+{{0}}|{_SIGN}{_UPPER}+{_LOWER}*{{0}}"
"""Words. A capital after a small letter begins another word. `{0}` is replaced by a pattern that may follow a word."""

_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


class ByteLevelConfig(NamedTuple):
    """The components and settings of a byte-level BPE tokenizer that differ between models."""

    pre_tokenizer: Any
    normalizer: Any = None
    ignore_merges: bool = False  # a word that is in the vocabulary is one token
    adds_bos: bool = False  # if the file does not say


def find_byte_level_config(name: str) -> ByteLevelConfig | None:
    """Return the config for a name in `tokenizer.ggml.pre`, or None if the name is not known."""
    match name:
        case "gpt-2":
            return ByteLevelConfig(_byte_level(use_regex=True))
        case "smollm" | "starcoder" | "refact" | "command-r":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return ByteLevelConfig(pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)]))
        case "llama-bpe" | "llama3" | "llama-v3":
            return ByteLevelConfig(_split(_LETTERS, r"\p{N}{1,3}", r"[\r\n]*"), ignore_merges=True, adds_bos=True)
        case "deepseek-coder":
            cuts = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
            splits: list[Any] = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in cuts]
            digits = pre_tokenizers.Digits(individual_digits=True)
            return ByteLevelConfig(pre_tokenizers.Sequence([*splits, digits, _byte_level(use_regex=False)]))
        case "dbrx":  # Phi-4
            return ByteLevelConfig(_split(_LETTERS, r"\p{N}{1,3}", r"[\r\n]*"))
        case "qwen2":
            return ByteLevelConfig(_split(_LETTERS, r"\p{N}", r"[\r\n]*"), normalizers.NFC())
        case "tekken":  # Mistral Nemo
            words = _CASES.replace("{0}", "")
            return ByteLevelConfig(_split(words, r"\p{N}", r"[\r\n/]*"), ignore_merges=True, adds_bos=True)
        case "gpt-4o":  # Phi-4-mini
            return ByteLevelConfig(_split(_CASES.replace("{0}", _CONTRACTIONS + "?"), r"\p{N}{1,3}", r"[\r\n/]*"))
    return None


SUPPORTED = (
    *("gpt-2", "llama-bpe", "qwen2", "smollm", "starcoder", "refact", "command-r", "deepseek-coder"),
    *("dbrx", "tekken", "gpt-4o"),
)


def _split(words: str, numbers: str, after_signs: str) -> Any:
    """Return a pre-tokenizer that splits text into words, numbers, runs of signs and white space.

    A run of signs includes a space before it, and `after_signs` after it.
    """
    pattern = Regex(rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{after_signs}|{_SPACE}")
    split = pre_tokenizers.Split(pattern, behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


def _byte_level(*, use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)

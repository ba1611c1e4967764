"""How text is cut into words before byte-level BPE merges within them: `tokenizer.ggml.pre`, as `tokenizers` does it.

The name in a file stands for one known tokenizer (the converter finds it by what that one makes of a text). Here are
those whose own tokenizer.json is known for certain; for any other, guessing would give wrong ids now and then, and
nobody would notice.
"""

from typing import Any, NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Splitting(NamedTuple):
    """The parts of a byte-level BPE tokenizer that differ from one to another."""

    pre_tokenizer: Any
    normalizer: Any = None
    ignore_merges: bool = False  # a word that is in the vocabulary is taken whole
    adds_bos: bool = False  # where the file does not say


def splitting(name: str) -> Splitting | None:
    """The rule called `name`; None if it is not known."""
    match name:
        case "gpt-2":
            return Splitting(_byte_level(use_regex=True))
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return Splitting(pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)]))
        case "llama-bpe":
            return Splitting(_words("{1,3}"), ignore_merges=True, adds_bos=True)
        case "qwen2":
            return Splitting(_words(""), normalizers.NFC())
    return None


KNOWN = ("gpt-2", "smollm", "llama-bpe", "qwen2")


def _words(digits: str) -> Any:
    """Words with the sign or space before them, numbers of so many digits, runs of signs, and white space."""
    split = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


def _byte_level(*, use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)

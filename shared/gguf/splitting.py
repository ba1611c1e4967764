"""How text is cut into words before byte-level BPE merges within them: `tokenizer.ggml.pre`, as `tokenizers` does it.

The name in a file stands for one known tokenizer (the converter finds it by what that one makes of a text). Here are
those whose own tokenizer.json is known for certain; for any other, guessing would give wrong ids now and then, and
nobody would notice.
"""

from typing import Any, NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SIGN = r"[^\r\n\p{L}\p{N}]?"  # or space, before a word

_LETTERS = rf"{_CONTRACTIONS}|{_SIGN}\p{{L}}+"
"""Words; what an apostrophe shortens is a word of its own."""

_CASES = rf"{_SIGN}{_UPPER}*{_LOWER}+{{0}}|{_SIGN}{_UPPER}+{_LOWER}*{{0}}"
"""Words in which a capital behind a small letter begins another one; `{0}` is what may follow."""

_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


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
        case "smollm" | "starcoder" | "refact" | "command-r":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return Splitting(pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)]))
        case "llama-bpe" | "llama3" | "llama-v3":
            return Splitting(_split(_LETTERS, r"\p{N}{1,3}", r"[\r\n]*"), ignore_merges=True, adds_bos=True)
        case "deepseek-coder":
            cuts = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
            splits: list[Any] = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in cuts]
            digits = pre_tokenizers.Digits(individual_digits=True)
            return Splitting(pre_tokenizers.Sequence([*splits, digits, _byte_level(use_regex=False)]))
        case "dbrx":  # of Phi-4
            return Splitting(_split(_LETTERS, r"\p{N}{1,3}", r"[\r\n]*"))
        case "qwen2":
            return Splitting(_split(_LETTERS, r"\p{N}", r"[\r\n]*"), normalizers.NFC())
        case "tekken":  # of Mistral Nemo
            words = _CASES.replace("{0}", "")
            return Splitting(_split(words, r"\p{N}", r"[\r\n/]*"), ignore_merges=True, adds_bos=True)
        case "gpt-4o":  # of Phi-4-mini
            return Splitting(_split(_CASES.replace("{0}", _CONTRACTIONS + "?"), r"\p{N}{1,3}", r"[\r\n/]*"))
    return None


KNOWN = (
    *("gpt-2", "llama-bpe", "qwen2", "smollm", "starcoder", "refact", "command-r", "deepseek-coder"),
    *("dbrx", "tekken", "gpt-4o"),
)


def _split(words: str, numbers: str, behind_signs: str) -> Any:
    """Words, numbers, runs of signs with the space before them and what may follow, and white space."""
    pattern = Regex(rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{behind_signs}|{_SPACE}")
    split = pre_tokenizers.Split(pattern, behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


def _byte_level(*, use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)

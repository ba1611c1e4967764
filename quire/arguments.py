"""Checks and converts the arguments of `LLM`. For a wrong one, raise an `InvalidRequest` that names it."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from shared.errors import InvalidRequest, brief

PromptType: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; a mapping may have a `cache_salt`. Ids may be an
integer array of numpy or torch; one with two dimensions holds a prompt in each row. vLLM has the same name for it."""


def as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Return one prompt or several as a list; a list of ints is one prompt. Raise `InvalidRequest` for other types."""
    prompts = plain(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    check_type("prompts", prompts, Sequence, "a text, token ids, a mapping, or a list of these")
    if len(prompts) and is_integer(plain(prompts[0])):
        return [prompts]  # type: ignore[list-item]  # its first item shows that it holds token ids
    return [plain(prompt) for prompt in prompts]


def plain(value: Any) -> Any:
    """Return an array of numpy or torch as lists of numbers, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_integer(value: object) -> bool:
    """Return whether `value` is an integer of Python, numpy or torch; a bool is not."""
    return type(value) is int or (hasattr(value, "__index__") and not isinstance(value, bool))


def token_ids(ids: Any, vocab_size: int) -> list[int]:
    """Return a prompt's token ids as ints. Raise `InvalidRequest` with the item that is not a token id."""
    ids = plain(ids)
    check_type("prompt", ids, Sequence, "a text, token ids or a mapping")
    if isinstance(ids, (str, bytes)):
        raise InvalidRequest(f"prompt_token_ids must be a list of ids, got {brief(ids)}", "prompt")
    tokens = [token if type(token) is int else plain(token) for token in ids]
    for token in tokens:
        if not is_integer(token) or not 0 <= token < vocab_size:
            raise InvalidRequest(f"token ids must be from 0 to {vocab_size - 1}, got {brief(token)}", "prompt")
    return tokens


def check_type(name: str, value: object, types: type | tuple[type, ...], description: str) -> None:
    """Raise `InvalidRequest`, naming the argument, unless `value` is of one of `types`, which `description` names."""
    if not isinstance(value, types):
        raise InvalidRequest(f"{name} must be {description}, got {brief(value)}", name)

"""Checks and converts the arguments of `LLM` and its methods. An error names the argument."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict

from msgspec import Struct

from quire import vllm
from shared.errors import ConfigError, InvalidRequest, brief
from shared.params import boolean, whole


class TextPrompt(TypedDict):
    """A prompt as text. Prompts share cached blocks only if their salts are equal."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is its text, which is only shown in the result."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""Text, token ids, or one of the two mappings. Ids may be an integer array of numpy or torch; one with two dimensions
holds a prompt in each row. vLLM has the same names."""

OTHER_SETTINGS = frozenset(
    {"chat_template", "chat_template_content_format", "default_chat_template_kwargs", "served_model_name"}
    | {"reasoning_parser", "generation_config", "override_generation_config", "max_logprobs"}
    | {"scheduling_policy", "priority_ageing", "async_scheduling", "preemption_mode"}
    | {"enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"}
)
"""Settings of the server that `LLM` takes besides the parameters of its constructor."""


logger = logging.getLogger(__name__)


class Tokenization(Struct, frozen=True):
    """How the prompts of one call become token ids: `tokenization_kwargs`."""

    add_special_tokens: bool
    truncate_prompt_tokens: Any  # checked, like the side, by `Truncation`
    truncation_side: Any

    @classmethod
    def read(cls, options: Any, *, add_special_tokens: bool) -> "Tokenization":
        """Return the options over the defaults. Raise `InvalidRequest` for a wrong or unknown one."""
        options = {} if options is None else options
        check_type("tokenization_kwargs", options, Mapping, "a mapping")
        if unknown := options.keys() - set(cls.__struct_fields__):
            names = ", ".join(cls.__struct_fields__)
            raise InvalidRequest(
                f"tokenization_kwargs can have {names}, not {brief(sorted(map(str, unknown)))}", "tokenization_kwargs"
            )
        adds = boolean("add_special_tokens", options.get("add_special_tokens", add_special_tokens))
        return cls(adds, options.get("truncate_prompt_tokens"), options.get("truncation_side"))


def priorities(values: Any, num_prompts: int) -> list[int]:
    """Return the priority of each prompt; None means 0 for all. Raise `InvalidRequest` for anything else."""
    if values is None:
        return [0] * num_prompts
    check_type("priority", values, Sequence, "a list with a whole number for each prompt")
    if len(values) != num_prompts:
        raise InvalidRequest(f"there are {num_prompts} prompts, but {len(values)} priorities", "priority")
    return [whole("priority", value) for value in values]


def refuse(name: str, value: Any, reason: str) -> None:
    """Raise `InvalidRequest`, naming the argument, unless it asks for nothing."""
    items = value if isinstance(value, (list, tuple)) else [value]
    if any(item is not None and item != {} for item in items):
        raise InvalidRequest(f"{name} is not supported: {reason}; got {brief(value)}", name)


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


def seed_of(value: Any) -> int | None:
    """Return the argument `seed` of `LLM`. Raise `ConfigError` unless it is a whole number or None."""
    try:
        return None if value is None else whole("seed", value)
    except InvalidRequest as error:
        raise ConfigError(error.message) from error


def translate_arguments(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None, with vLLM's settings in `others` under Quire's names.

    Raise `ConfigError` for one that is not supported.
    """
    arguments = {name: value for name, value in {**settings, **others}.items() if value is not None}
    if str(num_engines := arguments.pop("data_parallel_size", 1)) != "1":
        raise ConfigError(f"data_parallel_size={num_engines} is not supported: LLM is one engine")
    own, notes = vllm.translate(arguments, python=True)
    for line in notes:
        logger.info("%s", line)
    taken = {name: _as_flag(value) for name, value in own.items() if name in settings or name in OTHER_SETTINGS}
    for name in own.keys() - taken.keys():
        if own[name] not in ("", False, []):
            raise ConfigError(f"LLM has no argument {name}, which is a setting of the server")
    return taken


def _as_flag(value: Any) -> Any:
    """Return a path as text and a mapping as JSON, as flags have them."""
    if isinstance(value, Path):
        return str(value)
    return json.dumps(value) if isinstance(value, dict) else value

"""`PeftConfig`: the adapter_config.json of a folder in PEFT's format.

What would change the result and is not supported is refused by its name: such an adapter must not be served wrongly.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import regex

from shared.errors import ModelError

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"

MATCHING_TIME = 1.0
"""Seconds that matching one name may take. Some expressions take years, and steps go on beside it more slowly."""

_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""The values of `init_lora_weights` that leave the model's own weights as they are."""


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that say what the tensors mean. PEFT has more, for training; they are ignored."""

    peft_type: str
    target_modules: list[str] | str
    r: int = 8
    lora_alpha: float = 8
    rank_pattern: dict[str, int] | None = None  # ranks of modules, by regular expression
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        """Return the rank of a module, by its name in the model."""
        return _by_pattern(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        """Return the factor of B A in a module."""
        alpha, rank = _by_pattern(self.alpha_pattern or {}, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Return whether the adapter changes a linear module, by its name in the model."""
        if self.exclude_modules and _names(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules.lower() == "all-linear" or _names(self.target_modules, module)
        if module in self.target_modules:
            return True
        return _names(self.target_modules, module) and self._transforms_layer_of(module)

    def _transforms_layer_of(self, module: str) -> bool:
        layers = self.layers_to_transform
        if layers is None or layers == []:
            return True
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        for pattern in patterns or [r"[^.]*"]:
            if match := _match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
                return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
        return False


def read_config(content: bytes) -> PeftConfig:
    """Return the config. Raise ModelError naming a field that is wrong or not supported."""
    try:
        fields = msgspec.json.decode(content, type=dict[str, Any])
        for name in _UNSUPPORTED:
            if fields.get(name):
                raise ModelError(f"{CONFIG_FILE}: {name} is not supported")
        config = msgspec.convert(fields, PeftConfig)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{CONFIG_FILE}: {error}") from error
    if config.peft_type != "LORA":
        raise ModelError(f"{CONFIG_FILE}: peft_type {config.peft_type!r} is not supported (supported: LORA)")
    if config.bias != "none":
        raise ModelError(f"{CONFIG_FILE}: bias {config.bias!r} is not supported (supported: none)")
    if config.init_lora_weights not in _PLAIN_STARTS:
        raise ModelError(
            f"{CONFIG_FILE}: init_lora_weights {config.init_lora_weights!r} changes the model's own weights; PEFT "
            "converts such an adapter when it is saved with path_initial_model_for_weight_conversion"
        )
    if min([config.r, *(config.rank_pattern or {}).values()]) < 1:
        raise ModelError(f"{CONFIG_FILE}: a rank must be at least 1")
    _check_patterns(config)
    return config


def _check_patterns(config: PeftConfig) -> None:
    patterns = [*(config.rank_pattern or {}), *(config.alpha_pattern or {})]
    patterns += [field for field in (config.target_modules, config.exclude_modules) if isinstance(field, str)]
    layers = config.layers_pattern or []
    for pattern in (*patterns, *([layers] if isinstance(layers, str) else layers)):
        try:
            regex.compile(pattern)
        except (regex.error, RecursionError) as error:
            raise ModelError(f"{CONFIG_FILE}: {pattern!r} is no regular expression: {error}") from error


def _names(modules: list[str] | str, module: str) -> bool:
    """Return whether a regular expression matches a module, or a list has its name or the end of it."""
    if isinstance(modules, str):
        return _match(modules, module, regex.fullmatch) is not None
    return any(module == name or module.endswith(f".{name}") for name in modules)


def _by_pattern(patterns: Mapping[str, T], module: str, default: T) -> T:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT does."""
    return next((value for key, value in patterns.items() if _match(rf"(.*\.)?({key})$", module)), default)


def _match(pattern: str, module: str, match: Callable[..., Any] = regex.match) -> Any:
    """Return the match of a regular expression at the start of a module's name, or None.

    Other threads can run meanwhile, which Python's own matching would not let them.
    """
    try:
        return match(pattern, module, timeout=MATCHING_TIME, concurrent=True)
    except TimeoutError as error:
        raise ModelError(f"{CONFIG_FILE}: {pattern!r} takes too long to be matched with {module}") from error

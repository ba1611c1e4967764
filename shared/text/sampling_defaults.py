"""Reads sampling defaults from a model's generation_config.json, for the fields that a request does not set.

The user did not write this file, so an error in it does not prevent the start. The valid values are used, and one log
line names the others.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import ConfigError, InvalidRequest, ModelError, brief
from shared.params import SamplingParams
from shared.text.json_file import as_integer, as_number, read_json

logger = logging.getLogger(__name__)

KEYS = {"max_tokens": "max_new_tokens"}
"""The file's keys for the fields, if they differ from the fields' names."""

INTEGER_FIELDS = ("top_k", "max_tokens")


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """Defaults for fields of `SamplingParams`; None: the model has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # max_new_tokens in the file

    @classmethod
    def load(cls, folder: Path) -> "SamplingDefaults":
        """Read generation_config.json in `folder`. No file, or one without a JSON object, gives no defaults."""
        path = folder / "generation_config.json"
        try:
            config = read_json(path)
        except ModelError as error:
            logger.warning("%s; its sampling defaults are not used", error)
            return cls()
        return cls.from_config(config, path)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], path: Path) -> "SamplingDefaults":
        """Return the valid values in `config`, the content of `path`, and log the others."""
        defaults, invalid = cls._parse(config)
        if invalid:
            logger.warning(
                "%s: these values are ignored, since they are out of range or not numbers: %s", path, ", ".join(invalid)
            )
        return defaults

    @classmethod
    def from_override(cls, config: Mapping[str, Any], flag: str) -> "SamplingDefaults":
        """Return the values that a user gave with `flag`. Raise `ConfigError` if one cannot be used."""
        defaults, invalid = cls._parse(config)
        if invalid:
            raise ConfigError(f"{flag}: {invalid[0]} is out of range or not a number")
        return defaults

    @classmethod
    def _parse(cls, config: Mapping[str, Any]) -> tuple["SamplingDefaults", list[str]]:
        """Return the valid values, and a description of each invalid one."""
        valid: dict[str, Any] = {}
        invalid: list[str] = []
        for name in cls.__struct_fields__:
            key = KEYS.get(name, name)
            if (raw := config.get(key)) is None:
                continue
            if (value := _validate(name, raw)) is None:
                invalid.append(f"{key} {brief(raw)}")
            else:
                valid[name] = value
        return cls(**valid), invalid

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that have a value."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


def _validate(name: str, raw: Any) -> float | int | None:
    """Return the value as a number, or None if it is not a number or out of range."""
    value = as_integer(raw) if name in INTEGER_FIELDS else as_number(raw)
    if value is None or (name == "max_tokens" and value < 1):  # with 0, every output would be empty
        return None
    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except InvalidRequest:
        return None
    return value

"""Sampling defaults in a model's generation_config.json: values for what a request leaves open.

Nobody who serves a model wrote this file, so nothing in it ends a start: what can be read is read, the rest is left out
and named in one line of the log.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import ConfigError, InvalidRequest, ModelError, brief
from shared.params import SamplingParams
from shared.text.json_file import number, read_json, whole_number

logger = logging.getLogger(__name__)

KEYS = {"max_tokens": "max_new_tokens"}
"""The file's names of fields where they differ from ours."""

WHOLE = ("top_k", "max_tokens")


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """Values for fields of `SamplingParams` that a request did not give; None: no opinion."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # written max_new_tokens in the file

    @classmethod
    def load(cls, folder: Path) -> "SamplingDefaults":
        """Read `folder`/generation_config.json, if it is there. A file that is no JSON object says nothing."""
        path = folder / "generation_config.json"
        try:
            config = read_json(path)
        except ModelError as error:
            logger.warning("%s; no sampling defaults are taken from it", error)
            return cls()
        return cls.read(config, path)

    @classmethod
    def read(cls, config: Mapping[str, Any], path: Path) -> "SamplingDefaults":
        """Take the usable values out of what `path` holds, and log those that are not."""
        defaults, unusable = cls._sort(config)
        if unusable:
            logger.warning("%s: ignored, since it is out of range or no number: %s", path, ", ".join(unusable))
        return defaults

    @classmethod
    def demand(cls, config: Mapping[str, Any], place: str) -> "SamplingDefaults":
        """Take the values that a user wrote at `place`. Raise `ConfigError` for one that cannot be used."""
        defaults, unusable = cls._sort(config)
        if unusable:
            raise ConfigError(f"{place}: {unusable[0]} is out of range or no number")
        return defaults

    @classmethod
    def _sort(cls, config: Mapping[str, Any]) -> tuple["SamplingDefaults", list[str]]:
        """Return the usable values, and the others as words for people."""
        usable: dict[str, Any] = {}
        unusable: list[str] = []
        for name in cls.__struct_fields__:
            key = KEYS.get(name, name)
            if (given := config.get(key)) is None:
                continue
            if (value := _usable(name, given)) is None:
                unusable.append(f"{key} {brief(given)}")
            else:
                usable[name] = value
        return cls(**usable), unusable

    def given(self) -> dict[str, Any]:
        """The fields that have a value."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


def _usable(name: str, given: Any) -> float | int | None:
    value = whole_number(given) if name in WHOLE else number(given)
    if value is None or (name == "max_tokens" and value < 1):  # 0 would end every answer before it begins
        return None
    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except InvalidRequest:
        return None
    return value

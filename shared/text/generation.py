"""What a model's generation_config.json says of sampling: the defaults for what a request leaves open.

Nobody who serves a model wrote this file, so nothing in it ends a start: what can be read is read, the rest is left out
and named in one line of the log.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import ConfigError, InvalidRequest, ModelError
from shared.params import SamplingParams
from shared.text.json_file import number, read_json, whole_number

logger = logging.getLogger(__name__)

KEYS = {"max_tokens": "max_new_tokens"}
"""The file's names of fields where they differ from ours."""

WHOLE = ("top_k", "max_tokens")
SHOWN = 40
"""Characters of a value that is ignored."""


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
        usable: dict[str, Any] = {}
        ignored: list[str] = []
        for name in cls.__struct_fields__:
            key = KEYS.get(name, name)
            if (given := config.get(key)) is None:
                continue
            if (value := _usable(name, given)) is None:
                ignored.append(f"{key} {repr(given)[:SHOWN]}")
            else:
                usable[name] = value
        if ignored:
            logger.warning("%s: ignored, since it is out of range or no number: %s", path, ", ".join(ignored))
        return cls(**usable)

    @classmethod
    def demand(cls, config: Mapping[str, Any], place: str) -> "SamplingDefaults":
        """Take the values that a user wrote at `place`. Raise `ConfigError` for one that cannot be used."""
        found: dict[str, Any] = {}
        for name in cls.__struct_fields__:
            key = KEYS.get(name, name)
            if (given := config.get(key)) is None:
                continue
            if (value := _usable(name, given)) is None:
                raise ConfigError(f"{place}: {key} {repr(given)[:SHOWN]} is out of range or no number")
            found[name] = value
        return cls(**found)

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

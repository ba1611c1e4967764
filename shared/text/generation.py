"""What a model's generation_config.json says of sampling: the defaults for what a request leaves open."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import InvalidRequest, ModelError
from shared.params import SamplingParams
from shared.text.tokenizer import read_json


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
        """From `folder`/generation_config.json, if it is there. Raises `ModelError` for values out of range."""
        path = folder / "generation_config.json"
        found = read_json(path)
        names = {name: name for name in cls.__struct_fields__} | {"max_tokens": "max_new_tokens"}
        given = {name: found[key] for name, key in names.items() if found.get(key) is not None}
        try:
            defaults = msgspec.convert(given, cls)
            SamplingParams(**defaults.given())
        except (msgspec.ValidationError, InvalidRequest) as error:
            raise ModelError(f"{path}: {error}") from error
        return defaults

    def given(self) -> dict[str, Any]:
        """The fields that have a value."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

"""`LoraModule`: an adapter that `--lora-modules` names, in one of vLLM's two forms."""

import msgspec
from msgspec import Struct

from shared.errors import ConfigError, brief
from shared.protocol import MAX_SHORT_TEXT


class LoraModule(Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter to load at the start."""

    name: str
    path: str
    base_model_name: str | None = None  # of the model that it was made for; None: the one that is served

    def __str__(self) -> str:
        return f"--lora-modules {self.name}={self.path}"


def parse_lora_modules(values: list[str]) -> list[LoraModule]:
    """Return the adapters in the values of `--lora-modules`: each is NAME=PATH, or a JSON object with name and path.

    Raise `ConfigError` for anything else, and for a name that is too long or comes twice.
    """
    modules = [_parse(value) for value in values]
    for index, module in enumerate(modules):
        if not module.name or not module.path:
            raise ConfigError(f"--lora-modules {values[index]}: an adapter needs a name and a path")
        if max(len(module.name), len(module.path)) > MAX_SHORT_TEXT:  # which no message to or from an engine can carry
            raise ConfigError(
                f"--lora-modules {brief(values[index])}: names and paths have at most {MAX_SHORT_TEXT} characters"
            )
        if any(module.name == other.name for other in modules[:index]):
            raise ConfigError(f"--lora-modules names {module.name!r} twice")
    return modules


def _parse(value: str) -> LoraModule:
    if value.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(value, type=LoraModule)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--lora-modules {value}: {error}") from error
    name, equals, path = value.partition("=")
    if not equals:
        raise ConfigError(f'--lora-modules {value}: must be NAME=PATH, or {{"name": ..., "path": ...}}')
    return LoraModule(name.strip(), path.strip())

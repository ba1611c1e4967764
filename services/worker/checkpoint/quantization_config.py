"""The format of a checkpoint that packs integers in place of weights, by its own settings: GPTQ's and AWQ's.

They are the `quantization_config` of config.json, or a file beside it that the quantising tool wrote. Whatever else
they may ask for is refused by name, since its numbers would mean something else. No torch here: the command line asks
before anything starts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from services.worker.checkpoint.config_json import convert
from shared.errors import ModelError

GROUP = 32  # inputs; the products' own
SUPPORTED = (
    "quant_method gptq with 4 or 8 bits and awq with 4, of one group_size that is a multiple of 32 or -1, in the "
    "layouts gptq, gptq_v2 and gemm"
)

SETTINGS_FILES = ("quantize_config.json", "quant_config.json")
"""Files that AutoGPTQ and AutoAWQ write beside config.json; some tools write AWQ's settings under the first name."""

_SPELLINGS = {
    "quant_method": ("quant_method", "method"),
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "checkpoint_format": ("checkpoint_format", "format"),
}
"""The names that tools have for one setting."""

_AWQ_ONLY = frozenset(("w_bit", "q_group_size", "zero_point", "version"))
"""Settings by which a file that names no method is AWQ's, whatever it is called."""


class PackedFormat(Struct, frozen=True):
    """weight[n, k] = scale[g, n] * (code[n, k] - zero[g, n]), the codes and zeros as bits of int32."""

    method: Literal["gptq", "awq"]
    bits: int
    group_size: int  # inputs; -1: all of them
    zero_offset: int = 0  # what was taken off each zero before it was stored
    desc_act: bool = False  # groups were formed in the order of activations, and g_idx says which


class _Settings(NamedTuple):
    """Settings, and where they stand."""

    where: str
    values: Mapping[str, Any]

    def find(self, name: str) -> tuple[str, Any]:
        """Return the setting called `name` in any spelling, as (spelling, value); the value is None if it is absent.

        Raises ModelError if two spellings say different things.
        """
        found = [(key, self.values[key]) for key in _SPELLINGS.get(name, (name,)) if self.values.get(key) is not None]
        for key, value in found[1:]:
            if _lower(value) != _lower(found[0][1]):
                raise ModelError(f"{self.where}: {found[0][0]} is {found[0][1]!r}, and {key} is {value!r}")
        return found[0] if found else (name, None)

    def one_of(self, name: str, known: tuple[Any, ...], default: Any = None) -> Any:
        """Return the one of `known`, in lower case, that a setting is, or `default` where it is absent or null.

        Raises ModelError if it is none of them.
        """
        key, value = self.find(name)
        value = default if value is None else _lower(value)
        if value not in known:
            raise self.refused(key, value)
        return known[known.index(value)]

    def integer(self, name: str) -> int:
        """Return a setting that is an integer. Raises ModelError if it is absent or something else."""
        key, value = self.find(name)
        if value is None:
            raise ModelError(f"{self.where}: {name} is missing")
        try:
            return msgspec.convert(value, int)
        except msgspec.ValidationError as error:
            raise ModelError(f"{self.where}: {key}: {error}") from error

    def refused(self, name: str, value: object) -> ModelError:
        return ModelError(
            f"{self.where}: {name} {value!r} is not supported (of quantised checkpoints these are: {SUPPORTED})"
        )


def packed_format(config: Mapping[str, Any]) -> PackedFormat | None:
    """Return the format of the checkpoint with this config.json, or None if it has none.

    Raises ModelError for kinds that are not supported.
    """
    settings = _in_config(config)
    return _format(settings) if settings else None


def with_settings_beside(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `config` with the quantization_config of a file beside it, where it has none of its own.

    Raises ModelError if that is not supported, or if two such files differ.
    """
    if _in_config(config):
        return config
    beside = _beside(folder, *SETTINGS_FILES)
    if len({_layout(settings) for settings in beside}) > 1:
        raise ModelError(f"{' and '.join(settings.where for settings in beside)} say different things")
    return config | {"quantization_config": dict(beside[0].values)} if beside else config


def disagreement(config: Mapping[str, Any], folder: Path) -> str | None:
    """Return a line about a file beside config.json whose settings mean other numbers than `config`, or None."""
    own = _in_config(config)
    if own is None:
        return None
    for name in SETTINGS_FILES:
        try:
            same = all(_layout(settings) == _layout(own) for settings in _beside(folder, name))
        except ModelError:
            same = False
        if not same:
            return f"config.json and {name} say different things of the quantised weights: config.json counts"
    return None


def _in_config(config: Mapping[str, Any]) -> _Settings | None:
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    found = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if found is None:
        return None
    return _Settings("config.json: quantization_config", convert(found, "quantization_config", dict[str, Any]))


def _beside(folder: Path, *names: str) -> list[_Settings]:
    """Return the settings, each with a method, of the files called `names` that say how many bits there are."""
    read = [_Settings(name, _read(folder / name)) for name in names if (folder / name).exists()]
    named = [settings for settings in read if settings.find("bits")[1] is not None]
    return [_Settings(one.where, {**one.values, "quant_method": _method(one)}) for one in named]


def _method(settings: _Settings) -> Any:
    _, method = settings.find("quant_method")
    if method is not None:
        return method
    return "awq" if settings.where == "quant_config.json" or _AWQ_ONLY & settings.values.keys() else "gptq"


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path.name}: {error}") from error


def _format(settings: _Settings) -> PackedFormat:
    method = settings.one_of("quant_method", ("gptq", "awq"), "")
    group_size = settings.integer("group_size")
    if group_size != -1 and (group_size < 1 or group_size % GROUP):
        raise settings.refused(settings.find("group_size")[0], group_size)
    return _gptq(settings, group_size) if method == "gptq" else _awq(settings, group_size)


def _layout(settings: _Settings) -> PackedFormat:
    """Return the format but for `desc_act`, which changes no number of a checkpoint that is as it should be."""
    return msgspec.structs.replace(_format(settings), desc_act=False)


def _gptq(settings: _Settings, group_size: int) -> PackedFormat:
    bits = settings.one_of("bits", (4, 8))
    layout = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    settings.one_of("pack_dtype", ("int32",), "int32")
    settings.one_of("is_marlin_format", (False,), False)
    for pattern in settings.values.get("dynamic") or {}:
        if not pattern.startswith("-:"):  # those with a minus are not quantised; others have bits of their own
            raise settings.refused("dynamic", pattern)
    desc_act = settings.one_of("desc_act", (False, True), False)
    return PackedFormat("gptq", bits, group_size, 1 if layout == "gptq" else 0, desc_act)


def _awq(settings: _Settings, group_size: int) -> PackedFormat:
    bits = settings.one_of("bits", (4,))
    settings.one_of("backend", ("autoawq", "auto"), "autoawq")
    settings.one_of("checkpoint_format" if settings.find("version")[1] is None else "version", ("gemm",), "gemm")
    return PackedFormat("awq", bits, group_size)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value

"""`QuantizationConfig`: how a GPTQ or AWQ checkpoint packs its quantised weights, by its own settings.

They are the `quantization_config` of config.json, or a file beside it that the quantising tool wrote. Any other setting
that would change what the numbers mean is refused by name. No torch here: the command line asks before anything starts.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from services.worker.checkpoint.config_json import ConfigJson, convert
from shared.errors import ModelError

CheckpointQuantization = Literal["gguf", "gptq", "awq"]
"""The ways in which a checkpoint itself may be quantised so that matmuls can use its numbers as they are."""

SETTINGS_FILES = ("quantize_config.json", "quant_config.json")
"""Files that AutoGPTQ and AutoAWQ write beside config.json; some tools write AWQ's settings under the first name."""

MARKER_FILES = ("hf_quant_config.json",)
"""Files of other tools, by which weights are known to be quantised although config.json does not say so."""

_GROUP_SIZE = 32  # inputs; the kernels' own
_SUPPORTED = (
    "quant_method gptq with 4 or 8 bits and awq with 4, of one group_size that is a multiple of 32 or -1, in the "
    "layouts gptq, gptq_v2 and gemm"
)

_SPELLINGS = {
    "quant_method": ("quant_method", "method"),
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "checkpoint_format": ("checkpoint_format", "format"),
}
"""The names that tools have for one setting."""

_AWQ_ONLY = frozenset(("w_bit", "q_group_size", "zero_point", "version"))
"""Settings by which a file that names no method is AWQ's, whatever it is called."""


class QuantizationConfig(Struct, frozen=True):
    """weight[n, k] = scale[g, n] * (quant[n, k] - zero_point[g, n]), quants and zero points as bits of int32."""

    method: Literal["gptq", "awq"]
    bits: int
    group_size: int  # inputs; -1: all of them
    zero_offset: int = 0  # what was taken off each zero point before it was stored
    desc_act: bool = False  # groups were formed in the order of activations, and g_idx says which


class _Settings(NamedTuple):
    """A tool's settings, and where they were found."""

    where: str
    values: Mapping[str, Any]

    def find(self, name: str) -> tuple[str, Any]:
        """Return the setting called `name` in any spelling, as (spelling, value); the value is None if it is absent.

        Raise ModelError if two spellings say different things.
        """
        spelled = [(key, self.values[key]) for key in _SPELLINGS.get(name, (name,)) if self.values.get(key) is not None]
        for key, value in spelled[1:]:
            if _lower(value) != _lower(spelled[0][1]):
                raise ModelError(f"{self.where}: {spelled[0][0]} is {spelled[0][1]!r}, and {key} is {value!r}")
        return spelled[0] if spelled else (name, None)

    def one_of(self, name: str, supported: tuple[Any, ...], default: Any = None) -> Any:
        """Return the one of `supported`, in lower case, that a setting is, or `default` where it is absent or null.

        Raise ModelError if it is none of them.
        """
        key, value = self.find(name)
        value = default if value is None else _lower(value)
        if value not in supported:
            raise self.unsupported(key, value)
        return supported[supported.index(value)]

    def integer(self, name: str) -> int:
        """Return a setting that is an integer. Raise ModelError if it is absent or something else."""
        key, value = self.find(name)
        if value is None:
            raise ModelError(f"{self.where}: {name} is missing")
        try:
            return msgspec.convert(value, int)
        except msgspec.ValidationError as error:
            raise ModelError(f"{self.where}: {key}: {error}") from error

    def unsupported(self, name: str, value: object) -> ModelError:
        return ModelError(
            f"{self.where}: {name} {value!r} is not supported (of quantised checkpoints these are: {_SUPPORTED})"
        )


def read_quantization(config: ConfigJson, beside: Mapping[str, bytes]) -> QuantizationConfig | None:
    """Return how the weights are quantised by `config` or, if that says nothing, by the files `beside` it; None if
    they are not. `beside` has the files' contents by name.

    Raise ModelError if that is not supported, if two such files differ, or if something else says that the weights are
    quantised.
    """
    if own := _in_config(config):
        return _parse(own)
    settings = _in_files(beside, *SETTINGS_FILES)
    if len({_layout(one) for one in settings}) > 1:
        raise ModelError(f"{' and '.join(one.where for one in settings)} say different things")
    if settings:
        return _parse(settings[0])
    if marker := _unexplained_marker(config, beside):
        raise ModelError(f"{marker}, which is not supported (of quantised checkpoints these are: {_SUPPORTED})")
    return None


def find_conflict(config: ConfigJson, beside: Mapping[str, bytes]) -> str | None:
    """Return a line about a file beside config.json whose settings mean other numbers than `config`, or None."""
    own = _in_config(config)
    if own is None:
        return None
    for name in SETTINGS_FILES:
        try:
            same = all(_layout(settings) == _layout(own) for settings in _in_files(beside, name))
        except ModelError:
            same = False
        if not same:
            return f"config.json and {name} say different things of the quantised weights: config.json counts"
    return None


def _in_config(config: ConfigJson) -> _Settings | None:
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    values = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if values is None:
        return None
    return _Settings("config.json: quantization_config", convert(values, "quantization_config", dict[str, Any]))


def _in_files(beside: Mapping[str, bytes], *names: str) -> list[_Settings]:
    """Return the settings, each with a method, of the files called `names` that say how many bits there are."""
    settings = [_Settings(name, _decode(name, beside[name])) for name in names if name in beside]
    with_bits = [one for one in settings if one.find("bits")[1] is not None]
    return [_Settings(one.where, {**one.values, "quant_method": _method(one)}) for one in with_bits]


def _method(settings: _Settings) -> Any:
    _, method = settings.find("quant_method")
    if method is not None:
        return method
    return "awq" if settings.where == "quant_config.json" or _AWQ_ONLY & settings.values.keys() else "gptq"


def _decode(name: str, content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ModelError(f"{name}: {error}") from error


def _unexplained_marker(config: ConfigJson, beside: Mapping[str, bytes]) -> str | None:
    """Return what says that the weights are quantised although nothing says how, or None."""
    if config.get("compression_config"):
        return "config.json has a compression_config"
    file = next((name for name in (*MARKER_FILES, *SETTINGS_FILES) if name in beside), None)
    return f"there is a {file}, but no quantization_config in config.json" if file else None


def _parse(settings: _Settings) -> QuantizationConfig:
    method = settings.one_of("quant_method", ("gptq", "awq"), "")
    group_size = settings.integer("group_size")
    if group_size != -1 and (group_size < 1 or group_size % _GROUP_SIZE):
        raise settings.unsupported(settings.find("group_size")[0], group_size)
    return _gptq(settings, group_size) if method == "gptq" else _awq(settings, group_size)


def _layout(settings: _Settings) -> QuantizationConfig:
    """Return all but `desc_act`, which changes no number of a checkpoint that is as it should be."""
    return msgspec.structs.replace(_parse(settings), desc_act=False)


def _gptq(settings: _Settings, group_size: int) -> QuantizationConfig:
    bits = settings.one_of("bits", (4, 8))
    layout = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    settings.one_of("pack_dtype", ("int32",), "int32")
    settings.one_of("is_marlin_format", (False,), False)
    for pattern in settings.values.get("dynamic") or {}:
        if not pattern.startswith("-:"):  # those with a minus are not quantised; others have bits of their own
            raise settings.unsupported("dynamic", pattern)
    desc_act = settings.one_of("desc_act", (False, True), False)
    return QuantizationConfig("gptq", bits, group_size, 1 if layout == "gptq" else 0, desc_act)


def _awq(settings: _Settings, group_size: int) -> QuantizationConfig:
    bits = settings.one_of("bits", (4,))
    settings.one_of("backend", ("autoawq", "auto"), "autoawq")
    settings.one_of("checkpoint_format" if settings.find("version")[1] is None else "version", ("gemm",), "gemm")
    return QuantizationConfig("awq", bits, group_size)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value

"""`QuantizationConfig`: how a GPTQ, AWQ or SqueezeLLM checkpoint packs its quantised weights.

The settings are in `quantization_config` of config.json, or in a file that the quantisation tool wrote beside it. Any
other setting that would change what the numbers mean is refused by name. This module imports no torch, since the
command line uses it before anything starts.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from services.worker.checkpoint.config_json import MAX_SIZE, ConfigJson, convert
from shared.errors import ModelError

CheckpointQuantization = Literal["gguf", "gptq", "awq", "squeezellm"]
"""Formats of quantised checkpoints whose quants matmuls use directly, without dequantising them."""

SETTINGS_FILES = ("quantize_config.json", "quant_config.json")
"""Files that AutoGPTQ and AutoAWQ write beside config.json; some tools write AWQ's settings under the first name.

SqueezeLLM's own tool writes the second one, with `wbits` and nothing else.
"""

MARKER_FILES = ("hf_quant_config.json",)
"""Files of other tools. They mean that weights are quantised, although config.json does not say so."""

QUANT_GROUP_SIZE = 32  # that of kernels.quantized, which imports torch
_SUPPORTED = (
    "quant_method gptq with 4 or 8 bits and awq with 4, of one group_size that is a multiple of 32 or -1, in the "
    "layouts gptq, gptq_v2 and gemm; squeezellm with 4 bits"
)

_SPELLINGS = {
    "quant_method": ("quant_method", "method"),
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "checkpoint_format": ("checkpoint_format", "format"),
}
"""Names of a setting in different tools."""

_AWQ_ONLY = frozenset(("w_bit", "q_group_size", "zero_point", "version"))
"""Settings that only AWQ has. A file without a method that has one of them is AWQ's."""


class QuantizationConfig(Struct, frozen=True):
    """weight[n, k] = scale[g, n] * (quant[n, k] - zero_point[g, n]), quants and zero points as bits of int32.

    SqueezeLLM has tables in place of groups, and no setting but the bits: services/worker/checkpoint/squeezellm.py.
    """

    method: Literal["gptq", "awq", "squeezellm"]
    bits: int
    group_size: int  # inputs; -1: all of them
    zero_offset: int = 0  # subtracted from each zero point before it was stored
    desc_act: bool = False  # inputs were sorted by activation before they were grouped; g_idx has their groups


class _Settings(NamedTuple):
    """A tool's settings, and the file or field that has them."""

    source: str
    values: Mapping[str, Any]

    def find(self, name: str) -> tuple[str, Any]:
        """Return the setting called `name` in any spelling, as (spelling, value); the value is None if it is absent.

        Raise ModelError if two spellings say different things.
        """
        spelled = [(key, self.values[key]) for key in _SPELLINGS.get(name, (name,)) if self.values.get(key) is not None]
        for key, value in spelled[1:]:
            if _lower(value) != _lower(spelled[0][1]):
                raise ModelError(f"{self.source}: {spelled[0][0]} is {spelled[0][1]!r}, and {key} is {value!r}")
        return spelled[0] if spelled else (name, None)

    def one_of(self, name: str, supported: tuple[Any, ...], default: Any = None) -> Any:
        """Return the value of a setting, in lower case, or `default` if it is absent or null.

        Raise ModelError unless it is one of `supported`.
        """
        key, value = self.find(name)
        value = default if value is None else _lower(value)
        if value not in supported:
            raise self.unsupported(key, value)
        return supported[supported.index(value)]

    def integer(self, name: str) -> int:
        """Return the value of a setting. Raise ModelError if it is absent or not an integer."""
        key, value = self.find(name)
        if value is None:
            raise ModelError(f"{self.source}: {name} is missing")
        try:
            return msgspec.convert(value, int)
        except msgspec.ValidationError as error:
            raise ModelError(f"{self.source}: {key}: {error}") from error

    def unsupported(self, name: str, value: object) -> ModelError:
        return ModelError(
            f"{self.source}: {name} {value!r} is not supported (of quantised checkpoints these are: {_SUPPORTED})"
        )


def read_quantization(config: ConfigJson, files: Mapping[str, bytes]) -> QuantizationConfig | None:
    """Return the format of quantised weights, from `config` or else from the other `files`; None if there is none.

    `files` are the contents of the files beside config.json, by name. Raise ModelError if the format is not supported,
    if two files differ, or if the weights seem to be quantised in an unknown format.
    """
    if own := _settings_in_config(config):
        return _parse(own)
    in_files = _settings_in_files(files, *SETTINGS_FILES)
    if len({_without_desc_act(settings) for settings in in_files}) > 1:
        raise ModelError(f"{' and '.join(settings.source for settings in in_files)} say different things")
    if in_files:
        return _parse(in_files[0])
    if marker := _unexplained_marker(config, files):
        raise ModelError(f"{marker}, which is not supported (of quantised checkpoints these are: {_SUPPORTED})")
    return None


def find_conflict(config: ConfigJson, files: Mapping[str, bytes]) -> str | None:
    """Return a warning if a file beside config.json has settings that contradict `config`, or None."""
    own = _settings_in_config(config)
    if own is None:
        return None
    for name in SETTINGS_FILES:
        try:
            same = all(
                _without_desc_act(settings) == _without_desc_act(own) for settings in _settings_in_files(files, name)
            )
        except ModelError:
            same = False
        if not same:
            return f"config.json and {name} say different things of the quantised weights: config.json counts"
    return None


def _settings_in_config(config: ConfigJson) -> _Settings | None:
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    values = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if values is None:
        return None
    return _Settings("config.json: quantization_config", convert(values, "quantization_config", dict[str, Any]))


def _settings_in_files(files: Mapping[str, bytes], *names: str) -> list[_Settings]:
    """Return the settings in those of the files `names` that have the setting `bits`, each with its `quant_method`."""
    in_files = [_Settings(name, _decode(name, files[name])) for name in names if name in files]
    with_bits = [settings for settings in in_files if settings.find("bits")[1] is not None]
    return [
        _Settings(settings.source, {**settings.values, "quant_method": _method(settings)}) for settings in with_bits
    ]


def _method(settings: _Settings) -> Any:
    _, method = settings.find("quant_method")
    if method is not None:
        return method
    if settings.find("bits")[0] == "wbits" and settings.find("group_size")[1] is None:
        return "squeezellm"
    return "awq" if settings.source == "quant_config.json" or _AWQ_ONLY & settings.values.keys() else "gptq"


def _decode(name: str, content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{name}: {error}") from error


def _unexplained_marker(config: ConfigJson, files: Mapping[str, bytes]) -> str | None:
    """Return what suggests that the weights are quantised, in an unknown format; None if nothing does."""
    if config.get("compression_config"):
        return "config.json has a compression_config"
    file = next((name for name in (*MARKER_FILES, *SETTINGS_FILES) if name in files), None)
    return f"there is a {file}, but no quantization_config in config.json" if file else None


def _parse(settings: _Settings) -> QuantizationConfig:
    method = settings.one_of("quant_method", ("gptq", "awq", "squeezellm"), "")
    if method == "squeezellm":
        return QuantizationConfig(method, settings.one_of("bits", (4,)), -1)
    group_size = settings.integer("group_size")
    if group_size != -1 and (not 1 <= group_size <= MAX_SIZE or group_size % QUANT_GROUP_SIZE):
        raise settings.unsupported(settings.find("group_size")[0], group_size)
    return _gptq(settings, group_size) if method == "gptq" else _awq(settings, group_size)


def _without_desc_act(settings: _Settings) -> QuantizationConfig:
    """Return the config without `desc_act`, which changes nothing in a valid checkpoint: g_idx decides."""
    return msgspec.structs.replace(_parse(settings), desc_act=False)


def _gptq(settings: _Settings, group_size: int) -> QuantizationConfig:
    bits = settings.one_of("bits", (4, 8))
    layout = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    settings.one_of("pack_dtype", ("int32",), "int32")
    settings.one_of("is_marlin_format", (False,), False)
    dynamic = settings.values.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise settings.unsupported("dynamic", dynamic)
    for pattern in dynamic:
        if not pattern.startswith("-:"):  # '-:' excludes modules from quantisation; other patterns override their bits
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

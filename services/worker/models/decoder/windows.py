"""Sliding windows: `sliding_window` and `layer_types` of config.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from services.worker.checkpoint.config_json import UnsupportedByFamily, check_size, convert
from services.worker.models.spec import DecoderSpec
from shared.errors import ModelError

_SLIDING, _FULL = "sliding_attention", "full_attention"


def with_window(spec: DecoderSpec, window: int | None) -> DecoderSpec:
    """Return `spec` with a window of `window` positions in all layers, or without windows if it is None."""
    return replace(spec, layers=tuple(replace(layer, window=_window_size(window)) for layer in spec.layers))


def with_windows(spec: DecoderSpec, window: int | None, sliding: Sequence[bool]) -> DecoderSpec:
    """Return `spec` with a window of `window` positions in the layers for which `sliding` is true."""
    if any(sliding) and window is None:
        raise ModelError(f"config.json: layer_types has {_SLIDING}, but there is no sliding_window")
    pairs = zip(spec.layers, sliding, strict=True)
    return replace(
        spec, layers=tuple(replace(layer, window=_window_size(window)) if slide else layer for layer, slide in pairs)
    )


def sliding_layers(config: Mapping[str, Any], default: Sequence[bool]) -> list[bool]:
    """Return whether each layer has a window, by `layer_types` or else `default`. Raise ModelError if it is invalid."""
    if config.get("layer_types") is None:
        return list(default)
    layer_types = convert(config["layer_types"], "layer_types", list[str])
    if unknown := set(layer_types) - {_SLIDING, _FULL}:
        raise UnsupportedByFamily(
            f"config.json: layer_types {min(unknown)!r} is not supported (supported: {_SLIDING}, {_FULL})"
        )
    if len(layer_types) != len(default):
        raise ModelError(f"config.json: layer_types has {len(layer_types)} entries for {len(default)} layers")
    return [layer_type == _SLIDING for layer_type in layer_types]


def _window_size(window: int | None) -> int:
    return 0 if window is None else check_size("sliding_window", window)

"""Which layers see a window of the context only: `sliding_window` and `layer_types` of config.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from services.worker.checkpoint.config_json import UnsupportedByFamily, check_size, convert
from services.worker.models.spec import DecoderSpec
from shared.errors import ModelError

_SLIDING, _FULL = "sliding_attention", "full_attention"


def with_window(spec: DecoderSpec, window: int | None) -> DecoderSpec:
    """All layers see `window` positions; None is all of them."""
    return replace(spec, layers=tuple(replace(layer, window=_checked(window)) for layer in spec.layers))


def with_windows(spec: DecoderSpec, window: int | None, slides: Sequence[bool]) -> DecoderSpec:
    """The layers that slide see `window` positions."""
    if any(slides) and window is None:
        raise ModelError(f"config.json: layer_types has {_SLIDING}, but there is no sliding_window")
    pairs = zip(spec.layers, slides, strict=True)
    return replace(
        spec, layers=tuple(replace(layer, window=_checked(window)) if slide else layer for layer, slide in pairs)
    )


def sliding(config: Mapping[str, Any], default: Sequence[bool]) -> list[bool]:
    """Which layers slide by `layer_types`, or `default`; raises ModelError for other kinds, or another number."""
    if config.get("layer_types") is None:
        return list(default)
    kinds = convert(config["layer_types"], "layer_types", list[str])
    if unknown := set(kinds) - {_SLIDING, _FULL}:
        raise UnsupportedByFamily(
            f"config.json: layer_types {min(unknown)!r} is not supported (supported: {_SLIDING}, {_FULL})"
        )
    if len(kinds) != len(default):
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {len(default)} layers")
    return [kind == _SLIDING for kind in kinds]


def _checked(window: int | None) -> int:
    return 0 if window is None else check_size("sliding_window", window)

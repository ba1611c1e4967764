"""What config.json says of packed integers in place of weights: GPTQ's and AWQ's.

Whatever else a `quantization_config` may ask for is refused by name, since its numbers would mean something else. No
torch here: the command line asks before anything starts.
"""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from services.worker.models.config_json import convert, field
from shared.errors import ModelError

GROUP = 32  # inputs; the products' own
SUPPORTED = (
    "quant_method gptq with 4 or 8 bits and awq with 4, of one group_size that is a multiple of 32 or -1, in the "
    "layouts gptq, gptq_v2 and gemm"
)


class PackedFormat(Struct, frozen=True):
    """weight[n, k] = scale[g, n] * (code[n, k] - zero[g, n]), the codes and zeros as bits of int32."""

    method: Literal["gptq", "awq"]
    bits: int
    group_size: int  # inputs; -1: all of them
    zero_offset: int = 0  # what was taken off each zero before it was stored


def packed_format(config: Mapping[str, Any]) -> PackedFormat | None:
    """Of the checkpoint with this config.json, if it has one. Raises ModelError for kinds that are not supported."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    found = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if found is None:
        return None
    asked = convert(found, "quantization_config", dict[str, Any])
    method = field(asked, "quant_method", str, "")
    if method not in ("gptq", "awq"):
        raise _refused("quant_method", method)
    group_size = field(asked, "group_size", int)
    if group_size != -1 and (group_size < 1 or group_size % GROUP):
        raise _refused("group_size", group_size)
    return _gptq(asked, group_size) if method == "gptq" else _awq(asked, group_size)


def _gptq(asked: Mapping[str, Any], group_size: int) -> PackedFormat:
    bits = _one_of(asked, "bits", (4, 8))
    layout = _one_of(asked, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    _one_of(asked, "pack_dtype", ("int32",), "int32")
    _one_of(asked, "is_marlin_format", (False,), False)
    for pattern in asked.get("dynamic") or {}:
        if not pattern.startswith("-:"):  # those with a minus are not quantised; others have bits of their own
            raise _refused("dynamic", pattern)
    return PackedFormat("gptq", bits, group_size, 1 if layout == "gptq" else 0)


def _awq(asked: Mapping[str, Any], group_size: int) -> PackedFormat:
    bits = _one_of(asked, "bits", (4,))
    _one_of({"version": str(asked.get("version") or "gemm").lower()}, "version", ("gemm",))
    _one_of(asked, "backend", ("autoawq",), "autoawq")
    return PackedFormat("awq", bits, group_size)


def _one_of(asked: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any = None) -> Any:
    """The value of a field, or `default` where it is absent or null; raises ModelError if it is not `known`."""
    value = default if asked.get(name) is None else asked[name]
    if value not in known:
        raise _refused(name, value)
    return value


def _refused(name: str, value: object) -> ModelError:
    return ModelError(
        f"config.json: quantization_config: {name} {value!r} is not supported (of quantised checkpoints these are: "
        f"{SUPPORTED})"
    )

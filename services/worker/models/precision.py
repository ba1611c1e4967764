"""`choose_precision`: chooses the types of weights and cache from the settings, the device and the checkpoint.

It is a pure function. A setting that cannot be fulfilled is an error. With `auto`, quantised weights that cannot be
used are dequantised, and `why_dequantized` says why.
"""

from collections.abc import Set
from typing import Literal, NamedTuple

import torch

from kernels.layout import has_scales
from services.worker.checkpoint.quantization_config import CheckpointQuantization
from services.worker.config import WorkerConfig
from shared.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}

_KV_DTYPES = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}

Quantization = CheckpointQuantization | Literal["int8", "int4"]

_DESCRIPTIONS: dict[CheckpointQuantization, str] = {
    "gguf": "a GGUF file with blocks of Q2_K to Q8_0, IQ4_NL or IQ4_XS",
    "gptq": "a checkpoint whose quantization_config says gptq",
    "awq": "a checkpoint whose quantization_config says awq",
    "squeezellm": "a checkpoint whose quantization_config says squeezellm",
}


_OWN_FAMILY = "a family of Quire's own; `quire models` lists them"


class Precision(NamedTuple):
    """The types of weights and cache; on a CPU with compiled kernels, activations are float32."""

    dtype: torch.dtype  # of weights that are not quantised
    quantization: Quantization | None  # of matrices: the checkpoint's format, or the one to round to
    kv_dtype: torch.dtype  # int8 and float8_e4m3fn: quants with a scale for each token and head

    @property
    def name(self) -> str:
        """The type of the weights, for people."""
        return self.quantization or str(self.dtype).removeprefix("torch.")

    @property
    def lora_dtype(self) -> torch.dtype:
        """The type of adapters' weights."""
        return torch.bfloat16 if self.quantization else self.dtype


class ModelSource(NamedTuple):
    """The types of a checkpoint, and whose code computes the model."""

    dtype: torch.dtype  # of most tensors
    quantization: CheckpointQuantization | Literal["other"] | None  # other: a format that matmuls cannot use
    native: bool  # a family of Quire's own computes it


def choose_precision(
    config: WorkerConfig,
    device: torch.device,
    source: ModelSource,
    *,
    kv_cache_dtypes: Set[torch.dtype],
    quantized_weights: bool,
) -> Precision:
    """Return the precision of a model on a device. Raise ConfigError if a setting cannot be fulfilled.

    `kv_cache_dtypes` are the types that a cache may have on the device, beside that of the weights.
    `quantized_weights` is that of the device's `Ops`.
    """
    quantization = _quantization(config, device, source, quantized_weights)
    dtype = _dtype(config, device, source.dtype)
    kv_dtype = _kv_dtype(config, torch.bfloat16 if quantization else dtype)
    if problem := _kv_problem(kv_dtype, source, {dtype, *kv_cache_dtypes}):
        raise ConfigError(f"--kv-cache-dtype {config.kv_cache_dtype} {problem}")
    return Precision(dtype, quantization, kv_dtype)


def why_dequantized(
    config: WorkerConfig, device: torch.device, source: ModelSource, *, quantized_weights: bool
) -> str | None:
    """Return what is missing to use the checkpoint's quants; None if they are used, or if the settings decide."""
    if config.quantization != "auto" or config.dtype != "auto" or source.quantization is None:
        return None
    missing = _missing_requirement(device, source, quantized_weights)
    return missing or (_DESCRIPTIONS["gguf"] if source.quantization == "other" else None)


def _quantization(
    config: WorkerConfig, device: torch.device, source: ModelSource, quantized_weights: bool
) -> Quantization | None:
    requested, missing = config.quantization, _missing_requirement(device, source, quantized_weights)
    if requested == "none":
        return None
    if requested == "auto":
        own = None if source.quantization == "other" else source.quantization
        return None if missing or config.dtype != "auto" else own
    if requested in _DESCRIPTIONS and requested != source.quantization:
        raise ConfigError(f"--quantization {requested}: the model is not {_DESCRIPTIONS[requested]}")
    if missing:
        raise ConfigError(f"--quantization {requested} needs {missing}")
    return requested


def _missing_requirement(device: torch.device, source: ModelSource, quantized_weights: bool) -> str | None:
    """Return what quantised weights need and the model or device lacks; None if nothing."""
    if not source.native:
        return _OWN_FAMILY
    if quantized_weights:
        return None
    if device.type == "cpu":
        return "the kernels compiled for this CPU"
    return "a CPU: matmuls with quantised weights are not on GPUs yet"


def _dtype(config: WorkerConfig, device: torch.device, stored: torch.dtype) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32  # exact for any checkpoint
    return torch.bfloat16 if stored == torch.float32 else stored


def _kv_dtype(config: WorkerConfig, own: torch.dtype) -> torch.dtype:
    return own if config.kv_cache_dtype == "auto" else _KV_DTYPES[config.kv_cache_dtype]


def _kv_problem(kv_dtype: torch.dtype, source: ModelSource, taken: Set[torch.dtype]) -> str | None:
    """Return why the cache cannot have `kv_dtype` on a device that takes the types `taken`; None if it can."""
    if kv_dtype not in taken and kv_dtype == torch.float8_e4m3fn:
        return "needs a GPU of compute capability 8.9 or newer; int8 has the same size and works on every device"
    if kv_dtype not in taken:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in taken)
        return f"does not work on this device, where this model's cache may be {', '.join(names)}"
    if has_scales(kv_dtype) and not source.native:
        return f"needs {_OWN_FAMILY}"
    return None

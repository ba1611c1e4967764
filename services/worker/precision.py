"""In what types a model is computed: from the user's wishes, the device and what the checkpoint holds.

A pure function of these; whatever cannot be honoured is refused.
"""

from typing import Literal, NamedTuple

import torch

from services.worker.config import WorkerConfig
from shared.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}

Quantization = Literal["gguf", "int8", "int4"]


class Precision(NamedTuple):
    """How numbers are kept; on a CPU with compiled kernels, arithmetic is in float32 throughout."""

    dtype: torch.dtype  # of weights that are not quantised
    quantization: Quantization | None  # of matrices: as a GGUF file has them, or rounded when they are loaded
    kv_dtype: torch.dtype

    @property
    def name(self) -> str:
        """Of the weights' type, for people."""
        return self.quantization or str(self.dtype).removeprefix("torch.")


def choose_precision(
    config: WorkerConfig, device: torch.device, stored: torch.dtype, *, gguf: bool, native: bool, mixes: bool
) -> Precision:
    """For a checkpoint that is `stored` in a type, or as a GGUF file, and computed by a family of ours or not.

    `mixes` is whether the kernels take weights, cache and activations of different types. Raises ConfigError for what
    cannot be done.
    """
    quantization = None if config.quantization == "none" else config.quantization
    if quantization == "gguf" and not gguf:
        raise ConfigError("--quantization gguf: the model is no GGUF file")
    if quantization and not native:
        raise ConfigError(f"--quantization {quantization} needs a family of Quire's own; `quire models` lists them")
    if quantization and not mixes:
        raise ConfigError(f"--quantization {quantization} needs a CPU and the kernels compiled for it")
    dtype = _dtype(config, device, stored)
    kv_dtype = _kv_dtype(config, torch.bfloat16 if quantization else dtype)
    if kv_dtype != dtype and not mixes:
        raise ConfigError(f"--kv-cache-dtype {config.kv_cache_dtype} needs a CPU and the kernels compiled for it")
    return Precision(dtype, quantization, kv_dtype)


def _dtype(config: WorkerConfig, device: torch.device, stored: torch.dtype) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32  # exact for any checkpoint
    return torch.bfloat16 if stored == torch.float32 else stored


def _kv_dtype(config: WorkerConfig, own: torch.dtype) -> torch.dtype:
    return own if config.kv_cache_dtype == "auto" else DTYPES[config.kv_cache_dtype]

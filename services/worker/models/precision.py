"""`choose_precision`: the types in which a model is computed, from the settings, the device and the checkpoint.

A pure function of these. What is asked for by name and cannot be done is refused; quantised weights that `auto` cannot
keep are dequantised, and `why_dequantized` says why.
"""

from typing import Literal, NamedTuple

import torch

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

_KV_DTYPES = {**DTYPES, "int8": torch.int8}

Quantization = CheckpointQuantization | Literal["int8", "int4"]

_DESCRIPTIONS: dict[CheckpointQuantization, str] = {
    "gguf": "a GGUF file with blocks of Q4_0, Q4_1 or Q8_0",
    "gptq": "a checkpoint whose quantization_config says gptq",
    "awq": "a checkpoint whose quantization_config says awq",
}


class Precision(NamedTuple):
    """The types of weights and cache; on a CPU with compiled kernels, arithmetic is in float32 throughout."""

    dtype: torch.dtype  # of weights that are not quantised
    quantization: Quantization | None  # of matrices: as the checkpoint has them, or rounded when they are loaded
    kv_dtype: torch.dtype  # int8: quants with a scale for each token and head

    @property
    def name(self) -> str:
        """The type of the weights, for people."""
        return self.quantization or str(self.dtype).removeprefix("torch.")


class ModelSource(NamedTuple):
    """The types of a checkpoint, and whose code computes the model."""

    dtype: torch.dtype  # that most of the checkpoint is stored in
    quantization: CheckpointQuantization | Literal["other"] | None  # other: in quants that no matmul takes
    native: bool  # a family of Quire's own computes it


def choose_precision(
    config: WorkerConfig, device: torch.device, source: ModelSource, *, mixes_types: bool
) -> Precision:
    """Return the precision of a model on a device. Raise ConfigError for what is asked for and cannot be done.

    `mixes_types`: the device's kernels take quantised weights, and one type for weights and another for the cache.
    """
    quantization = _quantization(config, source, mixes_types)
    dtype = _dtype(config, device, source.dtype)
    kv_dtype = _kv_dtype(config, torch.bfloat16 if quantization else dtype)
    if kv_dtype == torch.int8:
        if not source.native:
            raise ConfigError("--kv-cache-dtype int8 needs a family of Quire's own; `quire models` lists them")
    elif kv_dtype != dtype and not mixes_types:
        raise ConfigError(f"--kv-cache-dtype {config.kv_cache_dtype} needs a CPU and the kernels compiled for it")
    return Precision(dtype, quantization, kv_dtype)


def why_dequantized(config: WorkerConfig, source: ModelSource, *, mixes_types: bool) -> str | None:
    """Return what the checkpoint's own quants would have needed, unless the settings ask for something else."""
    if config.quantization != "auto" or config.dtype != "auto" or source.quantization is None:
        return None
    return _obstacle(source, mixes_types) or (_DESCRIPTIONS["gguf"] if source.quantization == "other" else None)


def _quantization(config: WorkerConfig, source: ModelSource, mixes_types: bool) -> Quantization | None:
    requested, obstacle = config.quantization, _obstacle(source, mixes_types)
    if requested == "none":
        return None
    if requested == "auto":
        own = None if source.quantization == "other" else source.quantization
        return None if obstacle or config.dtype != "auto" else own
    if requested in _DESCRIPTIONS and requested != source.quantization:
        raise ConfigError(f"--quantization {requested}: the model is not {_DESCRIPTIONS[requested]}")
    if obstacle:
        raise ConfigError(f"--quantization {requested} needs {obstacle}")
    return requested


def _obstacle(source: ModelSource, mixes_types: bool) -> str | None:
    """Return what is needed to use quantised weights and is not there, or None."""
    if not source.native:
        return "a family of Quire's own; `quire models` lists them"
    return None if mixes_types else "a CPU and the kernels compiled for it"


def _dtype(config: WorkerConfig, device: torch.device, stored: torch.dtype) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32  # exact for any checkpoint
    return torch.bfloat16 if stored == torch.float32 else stored


def _kv_dtype(config: WorkerConfig, own: torch.dtype) -> torch.dtype:
    return own if config.kv_cache_dtype == "auto" else _KV_DTYPES[config.kv_cache_dtype]

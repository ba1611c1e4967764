"""In what types a model is computed: from the user's wishes, the device and what the checkpoint holds.

A pure function of these. What is asked for by name and cannot be done is refused; what `auto` cannot keep in few bits
is dequantised, and the precision says why.
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

_KV_DTYPES = {**DTYPES, "int8": torch.int8}

Stored = Literal["gguf", "gptq", "awq"]
"""The ways in which a checkpoint itself may be quantised."""

Quantization = Stored | Literal["int8", "int4"]

_MEANS: dict[Stored, str] = {
    "gguf": "a GGUF file with blocks of Q4_0, Q4_1 or Q8_0",
    "gptq": "a checkpoint whose quantization_config says gptq",
    "awq": "a checkpoint whose quantization_config says awq",
}


class Precision(NamedTuple):
    """How numbers are kept; on a CPU with compiled kernels, arithmetic is in float32 throughout."""

    dtype: torch.dtype  # of weights that are not quantised
    quantization: Quantization | None  # of matrices: as the checkpoint has them, or rounded when they are loaded
    kv_dtype: torch.dtype  # int8: codes with a scale for each token and head

    @property
    def name(self) -> str:
        """Of the weights' type, for people."""
        return self.quantization or str(self.dtype).removeprefix("torch.")


class Checkpoint(NamedTuple):
    """What the choice hangs on, of a checkpoint and its way through here."""

    dtype: torch.dtype  # that most of it is stored in
    quantization: Stored | Literal["other"] | None  # other: in codes that no product takes
    native: bool  # a family of ours computes it


def choose_precision(config: WorkerConfig, device: torch.device, stored: Checkpoint, *, mixes: bool) -> Precision:
    """For a checkpoint on a device; `mixes` is whether its kernels take few bits, and one type for weights and another
    for cache and activations. Raises ConfigError for what cannot be done.
    """
    quantization = _quantization(config, stored, mixes)
    dtype = _dtype(config, device, stored.dtype)
    kv_dtype = _kv_dtype(config, torch.bfloat16 if quantization else dtype)
    if kv_dtype == torch.int8:
        if not stored.native:
            raise ConfigError("--kv-cache-dtype int8 needs a family of Quire's own; `quire models` lists them")
    elif kv_dtype != dtype and not mixes:
        raise ConfigError(f"--kv-cache-dtype {config.kv_cache_dtype} needs a CPU and the kernels compiled for it")
    return Precision(dtype, quantization, kv_dtype)


def why_dequantised(config: WorkerConfig, stored: Checkpoint, *, mixes: bool) -> str | None:
    """What a checkpoint's own few bits would have needed, where nobody said that they are not wanted."""
    if config.quantization != "auto" or config.dtype != "auto" or stored.quantization is None:
        return None
    return _lacking(stored, mixes) or (_MEANS["gguf"] if stored.quantization == "other" else None)


def _quantization(config: WorkerConfig, stored: Checkpoint, mixes: bool) -> Quantization | None:
    wanted, lacking = config.quantization, _lacking(stored, mixes)
    if wanted == "none":
        return None
    if wanted == "auto":
        own = None if stored.quantization == "other" else stored.quantization
        return None if lacking or config.dtype != "auto" else own
    if wanted in _MEANS and wanted != stored.quantization:
        raise ConfigError(f"--quantization {wanted}: the model is not {_MEANS[wanted]}")
    if lacking:
        raise ConfigError(f"--quantization {wanted} needs {lacking}")
    return wanted


def _lacking(stored: Checkpoint, mixes: bool) -> str | None:
    """What few bits need and is not there."""
    if not stored.native:
        return "a family of Quire's own; `quire models` lists them"
    return None if mixes else "a CPU and the kernels compiled for it"


def _dtype(config: WorkerConfig, device: torch.device, stored: torch.dtype) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32  # exact for any checkpoint
    return torch.bfloat16 if stored == torch.float32 else stored


def _kv_dtype(config: WorkerConfig, own: torch.dtype) -> torch.dtype:
    return own if config.kv_cache_dtype == "auto" else _KV_DTYPES[config.kv_cache_dtype]

"""From a model folder to a decoder on a device."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.load import Ops
from services.worker.config import WorkerConfig
from services.worker.fingerprint import fingerprint, weights_digest
from services.worker.loader import RandomWeights, checkpoint_dtype, load_weights
from services.worker.models.causal_lm import CausalLM
from services.worker.models.decoder import Decoder
from services.worker.models.registry import choose, family, read_supported
from services.worker.models.trial import refuse_if_not_finite
from services.worker.naming import naming
from services.worker.weight_files import WeightFiles
from shared.errors import ModelError

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True)
class Model:
    """A loaded model."""

    decoder: CausalLM
    dtype: torch.dtype
    fingerprint: str
    weights: str  # digest of the files


def load_model(folder: Path, config: WorkerConfig, device: torch.device, ops: Ops) -> Model:
    """Read config and weights. Raises ModelError for whatever is missing, broken or not supported, naming `folder`."""
    with naming(folder):
        return _load(folder, config, device, ops)


def _load(folder: Path, config: WorkerConfig, device: torch.device, ops: Ops) -> Model:
    described = read_supported(folder, config.model_impl)
    way = choose(described, config.model_impl)
    if not way.native:
        return _through_transformers(folder, way.architecture, config, device, ops)
    found = family(way.architecture)
    spec = found.spec(described)
    if config.load_format == "dummy":
        dtype = _dtype(config, device, torch.bfloat16)
        weights = RandomWeights(spec, dtype, device)
        decoder = Decoder(spec, weights, ops)
        return Model(decoder, dtype, fingerprint(folder, [], dtype, device), weights_digest(folder, []))
    files = WeightFiles(folder, config.load_format)
    dtype = _dtype(config, device, checkpoint_dtype(folder, files))
    with load_weights(files, spec, found.names, dtype, device) as checkpoint:
        decoder = Decoder(spec, checkpoint, ops)
    refuse_if_not_finite(decoder, dtype, device, ops)
    paths = files.paths
    return Model(decoder, dtype, fingerprint(folder, paths, dtype, device), weights_digest(folder, paths))


def _through_transformers(
    folder: Path, architecture: str, config: WorkerConfig, device: torch.device, ops: Ops
) -> Model:
    from transformers import __version__  # seconds to import, and only models without a family need it

    from services.worker.models.fallback.model import load

    files = None if config.load_format == "dummy" else WeightFiles(folder, config.load_format)
    dtype = _dtype(config, device, checkpoint_dtype(folder, files) if files else torch.bfloat16)
    model = load(folder, architecture, files, dtype, device, ops)
    paths = files.paths if files else []
    name = fingerprint(folder, paths, dtype, device, code=f"transformers {__version__}")
    return Model(model, dtype, name, weights_digest(folder, paths))


def choose_device(wanted: str) -> torch.device:
    """The device that `--device` asks for; raises ModelError if it is not there."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch finds no GPU here")
    return torch.device(wanted, 0) if wanted == "cuda" else torch.device(wanted)


def _dtype(config: WorkerConfig, device: torch.device, stored: torch.dtype) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32  # the CPU's fastest, and exact for any checkpoint
    return torch.bfloat16 if stored == torch.float32 else stored

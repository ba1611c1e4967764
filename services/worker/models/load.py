"""From a model folder to a decoder on a device."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.ops import Ops
from services.worker.checkpoint.errors import naming
from services.worker.checkpoint.quantization_config import disagreement, packed_format
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.config import WorkerConfig
from services.worker.models.causal_lm import CausalLM
from services.worker.models.decoder.decoder import Decoder
from services.worker.models.fingerprint import fingerprint, weights_digest
from services.worker.models.implementation import decide
from services.worker.models.parameters import RandomWeights, checkpoint_dtype, load_weights
from services.worker.models.precision import Checkpoint, Precision, choose_precision, why_dequantised
from services.worker.models.registry import Way, family, read_supported
from services.worker.models.sanity_check import refuse_if_not_finite
from shared.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A loaded model."""

    decoder: CausalLM
    precision: Precision
    fingerprint: str
    weights: str  # digest of the files


def load_model(folder: Path, config: WorkerConfig, device: torch.device, ops: Ops) -> Model:
    """Read config and weights. Raises ModelError for whatever is missing, broken or not supported, naming `folder`."""
    with naming(folder):
        return _load(folder, config, device, ops)


def _load(folder: Path, config: WorkerConfig, device: torch.device, ops: Ops) -> Model:
    described = read_supported(folder, config.model_impl)
    files = None if config.load_format == "dummy" else WeightFiles(folder, config.load_format, packed_format(described))
    if warning := disagreement(described, folder):
        log.warning(warning)
    dtype = checkpoint_dtype(folder, files) if files else torch.bfloat16
    way = decide(described, config.model_impl, files)
    if way.reason:
        log.warning("%s: %s is loaded by transformers' code instead of Quire's own", way.reason, way.architecture)
    stored = Checkpoint(dtype, files.quantization if files else None, way.native)
    precision = choose_precision(config, device, stored, mixes=ops.mixes_types)
    if reason := why_dequantised(config, stored, mixes=ops.mixes_types):
        log.warning(
            "the checkpoint's quantised weights are dequantised: to compute with them as they are needs %s", reason
        )
    kv = str(precision.kv_dtype).removeprefix("torch.")
    log.info("weights: %s; keys and values: %s", precision.name, kv)
    if not way.native:
        return _through_transformers(folder, way, files, precision, device, ops)
    found = family(way.architecture)
    spec = found.spec(described)
    if files is None:
        decoder = Decoder(spec, RandomWeights(spec, precision, device), ops, kv_dtype=precision.kv_dtype)
    else:
        with load_weights(files, spec, found.names, precision, device) as checkpoint:
            decoder = Decoder(spec, checkpoint, ops, kv_dtype=precision.kv_dtype)
        refuse_if_not_finite(decoder, precision.kv_dtype, device, ops)
    weights = weights_digest(folder, files.paths if files else [])
    return Model(decoder, precision, fingerprint(weights, precision, device), weights)


def _through_transformers(
    folder: Path, way: Way, files: WeightFiles | None, precision: Precision, device: torch.device, ops: Ops
) -> Model:
    from transformers import __version__  # seconds to import, and only models without a family need it

    from services.worker.models.fallback.model import load

    try:
        model = load(folder, way.architecture, files, precision.dtype, device, ops)
    except ModelError as error:
        if not way.reason:
            raise
        raise ModelError(f"{way.reason}; {str(error).removeprefix(f'{folder}: ')}") from error
    weights = weights_digest(folder, files.paths if files else [])
    return Model(model, precision, fingerprint(weights, precision, device, code=f"transformers {__version__}"), weights)


def choose_device(wanted: str) -> torch.device:
    """The device that `--device` asks for; raises ModelError if it is not there."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch finds no GPU here")
    return torch.device(wanted, 0) if wanted == "cuda" else torch.device(wanted)

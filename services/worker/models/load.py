"""`load_model`: loads a model folder onto a device."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.load import kv_cache_dtypes
from kernels.lora import LoraStack
from kernels.ops import Ops
from services.worker.checkpoint.config_json import ConfigJson, UnsupportedByFamily
from services.worker.checkpoint.errors import name_folder_in_errors
from services.worker.checkpoint.quantization_config import find_conflict
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.config import WorkerConfig
from services.worker.models.adapters.adapters import Adapters, LoraSizes
from services.worker.models.adapters.targets import find_targets
from services.worker.models.causal_lm import CausalLM
from services.worker.models.decoder.decoder import Decoder
from services.worker.models.fingerprint import fingerprint, weights_digest
from services.worker.models.parameters import RandomWeights, load_weights
from services.worker.models.precision import ModelSource, Precision, choose_precision, why_dequantized
from services.worker.models.registry import (
    Implementation,
    ModelImpl,
    fall_back_to_transformers,
    load_family,
    read_supported,
    refuse_what_only_families_have,
)
from services.worker.models.sanity_check import refuse_if_not_finite
from services.worker.models.spec import DecoderSpec, WeightNames
from services.worker.models.tensor_map import TensorMap
from services.worker.rank_group import RankGroup
from shared.errors import ModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A rank's part of a model on its device, the types in which it computes and caches, and the digests that identify
    it.
    """

    model: CausalLM
    precision: Precision
    fingerprint: str
    weights_digest: str
    group: RankGroup  # that computes the model together, not yet connected
    adapters: Adapters | None = None  # None: it takes none


class FamilyMatch(NamedTuple):
    """A checkpoint that a family can compute."""

    spec: DecoderSpec
    tensors: TensorMap | None  # None if there are no weight files
    names: WeightNames


def load_model(folder: Path, config: WorkerConfig, device: torch.device, ops: Ops) -> LoadedModel:
    """Load the model in `folder`. Raise ModelError naming it if something is missing, broken or not supported."""
    with name_folder_in_errors(folder):
        return _load(folder, config, device, ops)


def match_family(
    config: ConfigJson, implementation: Implementation, model_impl: ModelImpl, files: WeightFiles | None
) -> tuple[Implementation, FamilyMatch | None]:
    """Let the family read a checkpoint. Return the final implementation, and the match unless transformers serves it.

    The family reads config.json and, if there are `files`, the names of the tensors. If it lacks a feature,
    transformers serves the model instead. Raise ModelError naming what is wrong with the checkpoint, or the feature if
    `model_impl` does not allow transformers.
    """
    if not implementation.native:
        return implementation, None
    family = load_family(implementation.architecture)
    try:
        spec = family.read_spec(config)
        tensors = TensorMap(files, spec, family.names) if files else None
        return implementation, FamilyMatch(spec, tensors, family.names)
    except UnsupportedByFamily as error:
        return fall_back_to_transformers(implementation.architecture, model_impl, error), None


def choose_device(requested: str) -> torch.device:
    """Return the device that `--device` asks for. Raise ModelError if it is not there."""
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch finds no GPU here")
    return torch.device(requested, 0) if requested == "cuda" else torch.device(requested)


def _load(path: Path, config: WorkerConfig, device: torch.device, ops: Ops) -> LoadedModel:
    folder, named_implementation = read_supported(path, config.model_impl)
    files = None if config.load_format == "dummy" else WeightFiles(folder, config.load_format)
    if conflict := find_conflict(folder.config, folder.settings):
        logger.warning(conflict)
    dtype = files.main_dtype if files else torch.bfloat16
    implementation, match = match_family(folder.config, named_implementation, config.model_impl, files)
    if implementation.reason:
        line = "%s: %s is loaded by transformers' code instead of Quire's own"
        logger.warning(line, implementation.reason, implementation.architecture)
    if match is None:
        refuse_what_only_families_have(config)
    group = RankGroup(
        config.parallel, device, config.rendezvous, config.scheduler_timeout, ordered=config.batch_invariant
    )
    source = ModelSource(dtype, files.quantization if files else None, implementation.native)
    precision = _choose_precision(config, device, source, ops)
    code, adapters = "", None
    if match is None:
        model, code = _load_through_transformers(path, implementation, files, precision, device, ops)
    else:
        adapters = _room_for_adapters(match, config, precision, device, ops) if config.enable_lora else None
        model = _load_native(match, files, precision, device, ops, adapters.stacks if adapters else {}, group)
    weights = weights_digest(folder, files.paths if files else [])
    identity = fingerprint(
        weights, precision, device, config.parallel, code=code, batch_invariant=config.batch_invariant
    )
    return LoadedModel(model, precision, identity, weights, group, adapters)


def _choose_precision(config: WorkerConfig, device: torch.device, source: ModelSource, ops: Ops) -> Precision:
    precision = choose_precision(
        config,
        device,
        source,
        kv_cache_dtypes=kv_cache_dtypes(ops, device),
        quantized_weights=ops.quantized_weights,
    )
    if reason := why_dequantized(config, device, source, quantized_weights=ops.quantized_weights):
        logger.warning(
            "the checkpoint's quantised weights are dequantised: to compute with them as they are needs %s", reason
        )
    kv = str(precision.kv_dtype).removeprefix("torch.")
    logger.info("weights: %s; keys and values: %s", precision.name, kv)
    return precision


def _room_for_adapters(
    match: FamilyMatch, config: WorkerConfig, precision: Precision, device: torch.device, ops: Ops
) -> Adapters:
    sizes = LoraSizes(config.max_loras, config.max_lora_rank, precision.lora_dtype)
    return Adapters(find_targets(match.spec, match.names, config.parallel), sizes, ops, device)


def _load_native(
    match: FamilyMatch,
    files: WeightFiles | None,
    precision: Precision,
    device: torch.device,
    ops: Ops,
    lora: Mapping[str, LoraStack],
    group: RankGroup,
) -> Decoder:
    build = partial(Decoder, kv_dtype=precision.kv_dtype, lora=lora, group=group)
    if files is None or match.tensors is None:
        return build(match.spec, RandomWeights(match.spec, precision, device, group.parallel), ops)
    with load_weights(files, match.tensors, precision, device, group.parallel) as weights:
        decoder = build(match.spec, weights, ops)
    refuse_if_not_finite(decoder, precision.kv_dtype, device, ops, has_logits=group.parallel.is_last_stage)
    return decoder


def _load_through_transformers(
    folder: Path,
    implementation: Implementation,
    files: WeightFiles | None,
    precision: Precision,
    device: torch.device,
    ops: Ops,
) -> tuple[CausalLM, str]:
    """Return the model, and the name and version of the code that computes it."""
    from transformers import __version__  # takes seconds to import

    from services.worker.models.fallback.model import load

    try:
        model = load(folder, implementation.architecture, files, precision.dtype, device, ops)
    except ModelError as error:
        if not implementation.reason:
            raise
        raise ModelError(f"{implementation.reason}; {str(error).removeprefix(f'{folder}: ')}") from error
    return model, f"transformers {__version__}"

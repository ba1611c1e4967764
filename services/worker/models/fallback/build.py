"""Builds a model of transformers from a model folder, on its device and with its own eager attention.

`WeightFiles` reads the tensors, so the formats and errors are those of native families. As with those, a model with a
random or missing weight must not start.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from services.worker.checkpoint.weight_files import FLOATS, WeightFiles, check_float, warn_of_unused
from services.worker.models.device_copy import Copy, copy_to
from services.worker.models.fallback.sizes import check_sizes
from shared.errors import ModelError
from shared.hub.progress import progress


def build_model(
    folder: Path, architecture: str, files: WeightFiles | None, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a `PreTrainedModel`. Without `files`, its weights are random, by a fixed seed. Raise ModelError."""
    import transformers

    with silenced():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            for part in (config, config.get_text_config()):
                if hasattr(part, "quantization_config"):  # `WeightFiles` dequantises
                    del part.quantization_config
            model_class = getattr(transformers, architecture)
            if not isinstance(config, model_class.config_class):
                raise ModelError(
                    f"{folder}/config.json: model_type {config.model_type!r} is not that of {architecture}"
                )
            check_sizes(config.get_text_config())
            if getattr(config, "output_router_logits", False):  # only a training loss needs them
                config.output_router_logits = False
            if files is None:
                model = _random(model_class, config, dtype, device)
            else:
                model = _load(model_class, config, files, dtype, device)
        except (ModelError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # it checks configs in hundreds of ways, and may raise anything
            raise ModelError(f"{folder}: transformers cannot build {architecture}: {first_line(error)}") from error
    _use_eager_experts_if_needed(model)
    return model.to(device).eval().requires_grad_(False)


def _use_eager_experts_if_needed(model: Any) -> None:
    """Compute experts one by one if the rows of their weights are no multiple of 16 bytes.

    The default of transformers, one matmul for all experts, cannot take such weights.
    """
    row_bytes = [weight.shape[-1] * weight.itemsize for weight in model.parameters() if weight.ndim == 3]
    if any(size % 16 for size in row_bytes) and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def first_line(error: BaseException) -> str:
    """Return the first line of an error; with the second, if the first ends with a colon."""
    first, *others = f"{type(error).__name__}: {error}".strip().splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def _random(model_class: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    with torch.random.fork_rng(), device:
        torch.manual_seed(0)
        return model_class._from_config(config, dtype=dtype, attn_implementation="eager")


class TensorForDevice:
    """A tensor of a weight file that goes to `device` as transformers reads it.

    transformers reads a tensor by `tensor[...].to(device, dtype)`, and asks for the CPU unless it has a `device_map`,
    for which it needs another package. Most of a model would then be on the host before any of it is on the device.
    """

    def __init__(self, stored: Tensor, device: torch.device, copy: Copy) -> None:
        self._stored, self._device, self._copy = stored, device, copy

    def __getitem__(self, index: EllipsisType) -> "TensorForDevice":
        return self

    def to(self, device: Any, dtype: torch.dtype) -> Tensor:
        """Return the whole tensor in `dtype`, on its device instead of `device`."""
        tensor = torch.empty(self._stored.shape, dtype=dtype, device=self._device)
        self._copy([(tensor, self._stored)])
        return tensor


def _load(model_class: Any, config: Any, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> Any:
    tensors = {name: files.get(name) for name in files.names}
    with torch.device("meta"):
        outline = model_class._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="eager")
    _refuse_unfit(outline, tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    state_dict: dict[str, Any] = dict(tensors)
    if device.type != "cpu":
        to_device = copy_to(device)
        state_dict = {name: TensorForDevice(tensor, device, to_device) for name, tensor in tensors.items()}
    with progress("loading weights", total) as done:
        model, loading_info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state_dict,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the loading info lists them, and they are refused below
        )
        _copy_mapped(model, {tensor.untyped_storage().data_ptr() for tensor in tensors.values()})
        done(total)
    folder = files.paths[0].parent
    if mismatched := sorted(loading_info["mismatched_keys"]):
        raise _mismatch(*mismatched[0])
    if missing := sorted(loading_info["missing_keys"]):
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: tensor {missing[0]} is missing{more}")
    warn_of_unused(sorted(loading_info["unexpected_keys"]))
    return model


def _refuse_unfit(outline: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError for a weight of a quantised type or, if the model is larger than its files, one that is smaller
    in the files: transformers would allocate it and fill it with random numbers.

    `outline` is the model on the meta device. Masks and positions may be integers, as some checkpoints have them.
    """
    weights = dict(outline.named_parameters())
    stored = {_full_name(name, outline, weights): tensor for name, tensor in tensors.items()}
    for name, tensor in stored.items():
        plain = tensor.dtype in (*FLOATS, torch.bool)
        if not plain and (name in weights or name.endswith(".weight") or tensor.is_floating_point()):
            check_float(name, tensor.dtype)
    if sum(weight.numel() for weight in weights.values()) > sum(tensor.numel() for tensor in tensors.values()):
        for name, weight in weights.items():
            if name in stored and stored[name].numel() < weight.numel():
                raise _mismatch(name, stored[name].shape, weight.shape)


def _full_name(name: str, model: Any, weights: Mapping[str, Any]) -> str:
    """Return the model's name of a tensor. Some checkpoints leave out its first part."""
    full_name = f"{model.base_model_prefix}.{name}"
    return full_name if full_name in weights else name


def _mismatch(name: str, stored: Sequence[int], expected: Sequence[int]) -> ModelError:
    return ModelError(f"tensor {name} has shape {list(stored)}, and config.json says {list(expected)}")


def _copy_mapped(model: torch.nn.Module, mapped: set[int]) -> None:
    """Copy the tensors whose storage is a memory-mapped file (`mapped`, by address): files may change or vanish."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.untyped_storage().data_ptr() in mapped:
            tensor.data = tensor.data.clone()


@contextmanager
def silenced() -> Iterator[None]:
    """Silence transformers' progress bars and warnings within the block. Quire reports what users need."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()

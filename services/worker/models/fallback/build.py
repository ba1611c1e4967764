"""From a model folder to a model of transformers on its device, with its own eager attention.

Tensors come from our `WeightFiles`, so what may be read, and how a broken file is named, is the same for every model.
As in the loader of native families, a model with a random or missing weight must not start.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.worker.checkpoint.weight_files import FLOATS, WeightFiles, check_float
from services.worker.models.fallback.sizes import check_sizes
from shared.errors import ModelError
from shared.hub.progress import progress

log = logging.getLogger(__name__)


def build(folder: Path, architecture: str, files: WeightFiles | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The `PreTrainedModel`; without `files`, its weights are drawn from a fixed seed. Raises ModelError."""
    import transformers

    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            for part in (config, config.get_text_config()):
                if hasattr(part, "quantization_config"):  # our weights come dequantised
                    del part.quantization_config
            kind = getattr(transformers, architecture)
            if not isinstance(config, kind.config_class):
                raise ModelError(
                    f"{folder}/config.json: model_type {config.model_type!r} is not that of {architecture}"
                )
            check_sizes(config.get_text_config())
            if getattr(config, "output_router_logits", False):  # for a loss, which nobody asks for here
                config.output_router_logits = False
            model = _random(kind, config, dtype) if files is None else _loaded(kind, config, files, dtype)
        except ModelError:
            raise
        except Exception as error:  # it checks configs in hundreds of ways, and may raise anything
            raise ModelError(f"{folder}: transformers cannot build {architecture}: {first_line(error)}") from error
    _refit_experts(model)
    return model.to(device).eval().requires_grad_(False)


def _refit_experts(model: Any) -> None:
    """Compute experts one by one where the rows of their weights are no multiple of 16 bytes.

    transformers' own choice, one product for all experts, takes no others.
    """
    rows = [weight.shape[-1] * weight.itemsize for weight in model.parameters() if weight.ndim == 3]
    if any(size % 16 for size in rows) and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that may follow. A line that only announces the next one is no use."""
    first, *others = f"{type(error).__name__}: {error}".strip().splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def _random(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind._from_config(config, dtype=dtype, attn_implementation="eager")


def _loaded(kind: Any, config: Any, files: WeightFiles, dtype: torch.dtype) -> Any:
    tensors = {name: files.get(name) for name in files.names}
    with torch.device("meta"):
        outline = kind._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="eager")
    _refuse_unfit(outline, tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    with progress("loading weights", total) as done:
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # it tells of them, and they are refused below, by name
        )
        _own(model, {tensor.untyped_storage().data_ptr() for tensor in tensors.values()})
        done(total)
    folder = files.paths[0].parent
    if wrong := sorted(found["mismatched_keys"]):
        raise _mismatch(*wrong[0])
    if missing := sorted(found["missing_keys"]):
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: tensor {missing[0]} is missing{more}")
    if others := sorted(found["unexpected_keys"]):
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        log.warning("tensors that the model has no place for are left out: %s%s", ", ".join(others[:5]), more)
    return model


def _refuse_unfit(outline: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raises ModelError naming a weight of a quantised type or, if the model is larger than its files, one that is
    smaller there: transformers would take memory for it and draw its numbers.

    `outline` is the model without its memory. Masks and positions may be integers, as some checkpoints have them.
    """
    weights = dict(outline.named_parameters())
    stored = {_known(name, outline, weights): tensor for name, tensor in tensors.items()}
    for name, tensor in stored.items():
        plain = tensor.dtype in (*FLOATS, torch.bool)
        if not plain and (name in weights or name.endswith(".weight") or tensor.is_floating_point()):
            check_float(name, tensor.dtype)
    if sum(weight.numel() for weight in weights.values()) > sum(tensor.numel() for tensor in tensors.values()):
        for name, weight in weights.items():
            if name in stored and stored[name].numel() < weight.numel():
                raise _mismatch(name, stored[name].shape, weight.shape)


def _known(name: str, model: Any, weights: Mapping[str, Any]) -> str:
    """The model's name of a tensor, which some checkpoints have without its first part."""
    whole = f"{model.base_model_prefix}.{name}"
    return whole if whole in weights else name


def _mismatch(name: str, stored: Sequence[int], expected: Sequence[int]) -> ModelError:
    return ModelError(f"tensor {name} has shape {list(stored)}, and config.json says {list(expected)}")


def _own(model: torch.nn.Module, mapped: set[int]) -> None:
    """Copy what still lies in a map of a file: it must not change or vanish with the file."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.untyped_storage().data_ptr() in mapped:
            tensor.data = tensor.data.clone()


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own progress bars and reports: they are said in our words, or are nobody's concern."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()

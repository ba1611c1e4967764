"""From a model folder to a model of transformers on its device, with its own eager attention.

Tensors come from our `WeightFiles`, so what may be read, and how a broken file is named, is the same for every model.
As in the loader of native families, a model with a random or missing weight must not start.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from services.worker.weight_files import WeightFiles
from shared.errors import ModelError
from shared.progress import progress

log = logging.getLogger(__name__)

_QUANTISED = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def build(folder: Path, architecture: str, files: WeightFiles | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The `PreTrainedModel`; without `files`, its weights are drawn from a fixed seed. Raises ModelError."""
    import transformers

    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            kind = getattr(transformers, architecture)
            if not isinstance(config, kind.config_class):
                raise ModelError(
                    f"{folder}/config.json: model_type {config.model_type!r} is not that of {architecture}"
                )
            if getattr(config, "output_router_logits", False):  # for a loss, which nobody asks for here
                config.output_router_logits = False
            model = _random(kind, config, dtype) if files is None else _loaded(kind, config, files, dtype)
        except ModelError:
            raise
        except Exception as error:  # it checks configs in hundreds of ways, and may raise anything
            raise ModelError(f"{folder}: transformers cannot build {architecture}: {first_line(error)}") from error
    return model.to(device).eval().requires_grad_(False)


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that may follow."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def _random(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind._from_config(config, dtype=dtype, attn_implementation="eager")


def _loaded(kind: Any, config: Any, files: WeightFiles, dtype: torch.dtype) -> Any:
    tensors = {name: files.get(name) for name in files.names}
    for name, tensor in tensors.items():
        if tensor.dtype in _QUANTISED:
            raise ModelError(f"tensor {name} is of {tensor.dtype}: quantised weights are not supported")
    total = sum(tensor.nbytes for tensor in tensors.values())
    with progress("loading weights", total) as done:
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
        _own(model, {tensor.untyped_storage().data_ptr() for tensor in tensors.values()})
        done(total)
    folder = files.paths[0].parent
    if missing := sorted(found["missing_keys"]):
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: tensor {missing[0]} is missing{more}")
    if others := sorted(found["unexpected_keys"]):
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        log.warning("tensors that the model has no place for are left out: %s%s", ", ".join(others[:5]), more)
    return model


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

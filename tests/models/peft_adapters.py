"""Makes random adapters of tiny models with PEFT, which is the measure of ours."""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel


@contextmanager
def _silenced() -> Iterator[None]:
    """Silence the warnings of PEFT and of what it calls within the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@_silenced()
def make_adapter(model: PreTrainedModel, folder: Path, *, seed: int = 0, pickled: bool = False, **config: Any) -> Path:
    """Save an adapter of `model`, whose weights are all random, in `folder`."""
    options: dict[str, Any] = {"r": 5, "lora_alpha": 7, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    peft_model = get_peft_model(copy.deepcopy(model), LoraConfig(**options | config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.15)
    peft_model.save_pretrained(folder)
    if pickled:  # as parameters, which some scripts save
        path = folder / "adapter_model.safetensors"
        parameters = {name: torch.nn.Parameter(tensor) for name, tensor in load_file(path).items()}
        torch.save(parameters, folder / "adapter_model.bin")
        path.unlink()
    return folder


@_silenced()
def adapted(model: PreTrainedModel, folder: Path, *, merged: bool = False) -> Any:
    """Return `model` with the adapter in `folder`, by PEFT."""
    peft_model = PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    return peft_model.merge_and_unload() if merged else peft_model


def set_adapter_config(folder: Path, **changes: Any) -> None:
    """Change fields of an adapter's config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_adapter(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace the tensors of an adapter by the result of `change`."""
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path)

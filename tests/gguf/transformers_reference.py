"""Makes transformers' models of GGUF files, with its own reader or (faster) from the tensors that Quire reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.weight_files import WeightFiles


def read(file: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of the file as transformers' reader returns them, for the architecture of `folder`.

    (Its `from_pretrained` would need another package.)
    """
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    checkpoint = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=empty)
    return checkpoint["config"], checkpoint["tensors"]


def from_quire_tensors(folder: Path) -> PreTrainedModel:
    """Return transformers' model, in float32, of a GGUF file's folder with the tensors that Quire's worker loads."""
    files = WeightFiles(ModelFolder.read(folder))
    return from_tensors(folder, {name: files.get(name) for name in files.names})


def from_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return transformers' model of these tensors, in float32."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    model.tie_weights()
    return model.eval()

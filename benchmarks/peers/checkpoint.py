"""The embedded model as vLLM, transformers and OpenVINO's exporter read it: a folder with bfloat16 weights."""

import shutil
from pathlib import Path

from shared.hub.checkpoint import locate

TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json")


def checkpoint(folder: Path) -> Path:
    """Its folder inside `folder`, made once out of the GGUF file's weights."""
    wanted = folder / "models" / "bfloat16"
    if not wanted.exists():
        import torch
        from safetensors.torch import save_file

        from services.worker.checkpoint.model_folder import ModelFolder
        from services.worker.checkpoint.weight_files import WeightFiles

        source, made = locate(""), wanted.with_suffix(".part")
        made.mkdir(parents=True, exist_ok=True)
        for name in TEXTS:
            shutil.copy(source / name, made)
        files = WeightFiles(ModelFolder.read(source))
        tensors = {name: files.get(name).to(torch.bfloat16).contiguous() for name in files.names}
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        made.rename(wanted)
    return wanted

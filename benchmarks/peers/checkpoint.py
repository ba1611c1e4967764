"""Makes the embedded model a folder with bfloat16 weights, which vLLM, transformers and OpenVINO can read."""

import shutil
from pathlib import Path

from shared.hub.checkpoint import locate

TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json")


def checkpoint(folder: Path) -> Path:
    """Return the model's folder inside `folder`, made once from the GGUF file's weights."""
    target = folder / "models" / "bfloat16"
    if not target.exists():
        import torch
        from safetensors.torch import save_file

        from services.worker.checkpoint.model_folder import ModelFolder
        from services.worker.checkpoint.weight_files import WeightFiles

        source, partial = locate(""), target.with_suffix(".part")
        partial.mkdir(parents=True, exist_ok=True)
        for name in TEXTS:
            shutil.copy(source / name, partial)
        files = WeightFiles(ModelFolder.read(source))
        tensors = {name: files.get(name).to(torch.bfloat16).contiguous() for name in files.names}
        save_file(tensors, partial / "model.safetensors", {"format": "pt"})
        partial.rename(target)
    return target

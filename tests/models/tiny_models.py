"""Makes tiny random models with transformers, and computes their logits with transformers and with Quire."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedConfig, PreTrainedModel

from tests.models.forward import Forward

LLAMA: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # with the default, tiny models hardly depend on their context
}

OPT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 60,
    "ffn_dim": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 60,
    "init_std": 0.3,
    "dropout": 0.0,
}


def llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return tiny(LlamaConfig(**(LLAMA | changes)), seed)


def opt(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return tiny(OPTConfig(**(OPT | changes)), seed)


def tiny(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a model of this config in eval mode, with the eager implementations of transformers."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"  # the only one with a softcap
    config._experts_implementation = "eager"  # the only one that takes any sizes
    return randomize_constants(AutoModelForCausalLM.from_config(config))


def randomize_constants(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with random biases, norms and routers too: at 0 or 1, a missing one would go unnoticed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name or ".ln_" in name:
                parameter.normal_(0.0 if model.config.model_type.startswith("gemma") else 1.0, 0.2)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0, 0.5)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Return logits (T, V) by transformers."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].float()


def transformers_logits(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Return logits (T, V) by the model that transformers loads from a folder."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return reference_logits(AutoModelForCausalLM.from_pretrained(folder, **plain).eval(), tokens)


def quire_logits(folder: Path, tokens: Sequence[int], **config: Any) -> Tensor:
    """Return logits (T, V) by the model that Quire loads from a folder."""
    forward = Forward(folder, **config)
    forward.enter(0, tokens, range(len(tokens)))
    return forward.step((0, 0, len(tokens)))[0]


def set_config(folder: Path, *absent: str, **changes: Any) -> None:
    """Change fields of a model folder's config.json, and remove those that shall be `absent`."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if name not in absent}))


def rewrite_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace the tensors of a model folder by the result of `change`."""
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path)


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Let `change` change the tensors of a model folder, which it gets by name."""

    def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        change(tensors)
        return tensors

    rewrite_weights(folder, changed)

"""The architectures that Quire serves, and the choice of the code that serves each.

Quire's decoder serves an architecture that has a family. transformers' modelling code serves others, if its attention
can be replaced by ours, and checkpoints with a feature that their family lacks (`match_family` in load.py). A
family's module is imported when a model needs it. This module imports no torch, since the command line uses it before
anything starts.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from services.worker.checkpoint.config_json import ConfigJson, UnsupportedByFamily, convert
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.config import WorkerConfig
from services.worker.models.fallback.catalog import causal_by_type, causal_models, with_replaceable_attention
from shared.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from services.worker.models.spec import Family

ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

ModelImpl = Literal["auto", "quire", "transformers"]
"""The values of --model-impl: the code that computes the model."""


class Implementation(NamedTuple):
    """The code that serves a model."""

    architecture: str
    native: bool  # one of Quire's families, rather than transformers
    reason: str = ""  # why the architecture's family does not serve it


def read_supported(path: Path, model_impl: ModelImpl = "auto") -> tuple[ModelFolder, Implementation]:
    """Return the model folder at `path`, and what serves it according to config.json.

    Raise ModelError, naming the folder, if it describes a kind of model that is not supported.
    """
    folder = ModelFolder.read(path)
    try:
        return folder, choose_implementation(folder.config, model_impl)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def choose_implementation(config: ConfigJson, model_impl: ModelImpl = "auto") -> Implementation:
    """Return what serves the model of a config.json, according to the name of its architecture.

    Raise ModelError naming the architecture if nothing does.
    """
    names = _architectures(config)
    native_name = next((name for name in names if name in ARCHITECTURES), None)
    if native_name and model_impl != "transformers":
        return Implementation(native_name, native=True)
    if model_impl == "quire":
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"--model-impl quire: no family of architecture {', '.join(names)} (there are: {supported})")
    fallback_name = next((name for name in names if name in with_replaceable_attention()), None)
    if fallback_name:
        return Implementation(fallback_name, native=False)
    raise ModelError(
        f"architecture {', '.join(names)} {_why_unsupported(names, config)}; `quire models` lists what is served"
    )


def fall_back_to_transformers(architecture: str, model_impl: ModelImpl, error: UnsupportedByFamily) -> Implementation:
    """Return the fallback for an architecture whose family raised `error`.

    Raise `error` if transformers cannot serve it either, or if `model_impl` does not allow it.
    """
    if model_impl != "auto" or architecture not in with_replaceable_attention():
        raise error
    return Implementation(architecture, native=False, reason=str(error))


def refuse_what_only_families_have(config: WorkerConfig) -> None:
    """Raise ConfigError naming a setting that transformers' code does not have."""
    settings = {
        "--batch-invariant": config.batch_invariant,
        "--enable-lora": config.enable_lora,
        "--tensor-parallel-size": config.tensor_parallel_size > 1,
        "--pipeline-parallel-size": config.pipeline_parallel_size > 1,
    }
    if flag := next((flag for flag, is_set in settings.items() if is_set), None):
        raise ConfigError(f"{flag} needs a family of Quire's own; `quire models` lists them")


def load_family(architecture: str) -> "Family":
    """Import and return the family of an architecture in `ARCHITECTURES`."""
    module = importlib.import_module(f"services.worker.models.families.{ARCHITECTURES[architecture]}")
    family: Family = module.FAMILY
    return family


def _architectures(config: ConfigJson) -> list[str]:
    """Return the names of the model's class. If they do not tell it, `model_type` does, as in transformers."""
    value = config.get("architectures") or []
    names = [value] if isinstance(value, str) else convert(value, "architectures", list[str])
    if names and (config.get("auto_map") or not all(map(_is_body_or_unknown, names))):
        return names
    model_type = config.get("model_type")
    if by_type := causal_by_type().get(str(model_type)):
        return [by_type]
    if not names:
        raise ModelError(
            f"config.json: no architectures named, and model_type {model_type!r} is no causal language model's"
        )
    return names


def _is_body_or_unknown(name: str) -> bool:
    """Return whether `name` may be the body of a causal model (LlamaModel), or an unknown name of its class."""
    return name not in ARCHITECTURES and name not in causal_models() and name.endswith(("Model", "ForCausalLM"))


def _why_unsupported(names: list[str], config: ConfigJson) -> str:
    if causal_models().intersection(names):
        return "is not supported: in transformers' code for it attention cannot be replaced, or is not all of its state"
    if config.get("auto_map"):
        return "needs code that comes with the checkpoint (auto_map), which is never run"
    if config.get("is_encoder_decoder"):
        return "is not supported: it is an encoder with a decoder"
    return "is not supported"

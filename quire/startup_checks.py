"""Checks that run before any service is started. They call the same functions as the services.

They only check that the files are there and of a supported type, so they are quick and do not import torch.
"""

from pathlib import Path

from quire.settings import Settings
from services.gateway.config import GatewayConfig
from services.gateway.served_model import named_generation_config
from services.scheduler.lora_modules import parse_lora_modules
from services.worker.checkpoint.model_folder import ModelFolder, find_weights
from services.worker.config import WorkerConfig
from services.worker.models.registry import read_supported, refuse_what_only_families_have
from services.worker.parallel_config import ParallelConfig
from shared.errors import ConfigError, ModelError
from shared.gguf.damage import damage_as_model_error
from shared.gguf.folder import display_path
from shared.hub.embedded import EMBEDDED
from shared.text.added_tokens import special_tokens
from shared.text.message_parser import check_names
from shared.text.template import ChatTemplate
from shared.text.tokenizer import check_tokenizer_files

DEFAULTS = WorkerConfig()

_SIZES = {"layers": ("num_hidden_layers", "n_layer"), "attention heads": ("num_attention_heads", "n_head")}
"""Fields of config.json, by the sizes of a model that all families have."""


def check_files(config: GatewayConfig) -> None:
    """Raise `QuireError` if a file that a flag names cannot be used, or if there is no parser that one names."""
    check_names(config.tool_call_parser, config.reasoning_parser)
    if config.generation_config not in ("auto", "vllm"):
        named_generation_config(config.generation_config)
    if config.chat_template:
        ChatTemplate.load(Path(), {}, config.chat_template)


def check_adapters(settings: Settings) -> None:
    """Raise `ConfigError` if the adapters that `--lora-modules` names cannot be served."""
    modules, names = parse_lora_modules(settings.scheduler.lora_modules), settings.gateway.served_model_name
    if modules and not settings.worker.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora")
    own_names = {settings.gateway.model or EMBEDDED, *names}
    for module in modules:
        if module.name in (names or own_names):
            raise ConfigError(f"{module}: {module.name!r} is a name of the model itself")
        if module.base_model_name is not None and module.base_model_name not in own_names:
            raise ConfigError(f"{module}: its base model {module.base_model_name!r} is not served here")


def check_model(
    folder: Path,
    worker: WorkerConfig = DEFAULTS,
    tokenizer: Path | None = None,
    template: str | Path | None = None,
) -> None:
    """Raise `QuireError` if the model in `folder` cannot be served with the settings of its workers.

    That is if it is not supported, has no weights or no tokenizer, if the ranks cannot divide it, or if its chat
    template does not parse or shows no messages. `tokenizer` is another folder for tokenizer and template; `template`
    replaces the latter.
    """
    check_architecture(folder, worker)
    text_folder = tokenizer or folder
    with damage_as_model_error(text_folder):
        check_tokenizer_files(text_folder)
        ChatTemplate.load(text_folder, special_tokens(text_folder), template).sanity_check()
    with damage_as_model_error(folder):
        if worker.load_format != "dummy":
            find_weights(folder, worker.load_format)


def check_architecture(folder: Path, worker: WorkerConfig) -> None:
    """Raise `QuireError` if workers with these settings cannot compute a model of this kind, or not divide it."""
    with damage_as_model_error(folder):
        model, implementation = read_supported(folder, worker.model_impl)
        if not implementation.native:
            refuse_what_only_families_have(worker)
        if worker.parallel.world_size > 1:
            _check_division(model, worker.parallel)


def _check_division(model: ModelFolder, parallel: ParallelConfig) -> None:
    """Raise `ModelError` for the sizes that most often cannot be divided: each rank would load torch to say so.

    The ranks check all sizes.
    """
    config = model.config.section("text_config") or model.config
    fields = ((name, config.get(field)) for name, names in _SIZES.items() for field in names)
    sizes = {name: size for name, size in fields if type(size) is int and size > 0}  # others are refused by the ranks
    try:
        if "layers" in sizes:
            parallel.check_num_layers(sizes.pop("layers"))
        parallel.check_divisible(sizes)
    except ModelError as error:
        raise ModelError(f"{display_path(model.path)}: {error}") from error

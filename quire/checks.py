"""Checks that run before any service is started. They call the same functions as the services.

They need neither torch nor time: they check that the files are there and of a supported kind.
"""

from pathlib import Path
from typing import Literal

from services.gateway.config import GatewayConfig
from services.gateway.served_model import named_generation_config
from services.worker.checkpoint.model_folder import WeightFormat, find_weights
from services.worker.models.registry import ModelImpl, read_supported
from shared.text.added_tokens import special_tokens
from shared.text.template import ChatTemplate
from shared.text.tokenizer import check_tokenizer_files


def check_files(config: GatewayConfig) -> None:
    """Raise `ModelError` if a file that a flag names cannot be used."""
    if config.generation_config not in ("auto", "vllm"):
        named_generation_config(config.generation_config)
    if config.chat_template:
        ChatTemplate.load(Path(), {}, Path(config.chat_template))


def check_model(
    folder: Path,
    load_format: WeightFormat | Literal["dummy"] = "auto",
    model_impl: ModelImpl = "auto",
    tokenizer: Path | None = None,
    template: Path | None = None,
) -> None:
    """Raise `ModelError` if the model in `folder` is not supported, there are no weights or no tokenizer, or the chat
    template does not parse or shows no messages.

    The tokenizer's folder may be another one, with a template of its own; `template` is a file that replaces it.
    """
    read_supported(folder, model_impl)
    texts = tokenizer or folder
    check_tokenizer_files(texts)
    ChatTemplate.load(texts, special_tokens(texts), template).sanity_check()
    if load_format != "dummy":
        find_weights(folder, load_format)

"""What can be told to be wrong before any service is started: the same functions that the services will call.

Only what takes no torch and no time: whether the files are there, and are of a kind that is supported.
"""

from pathlib import Path
from typing import Literal

from services.gateway.config import GatewayConfig
from services.gateway.served_model import named_generation_config
from services.worker.checkpoint.weight_paths import Format, find_weights
from services.worker.models.registry import Implementation, read_supported
from shared.text.added_tokens import special_tokens
from shared.text.template import ChatTemplate
from shared.text.tokenizer import check_there


def check_files(config: GatewayConfig) -> None:
    """Raises `ModelError` if a file that a flag names cannot be used."""
    if config.generation_config not in ("auto", "vllm"):
        named_generation_config(config.generation_config)
    if config.chat_template:
        ChatTemplate.load(Path(), {}, Path(config.chat_template))


def check_model(
    folder: Path,
    load_format: Format | Literal["dummy"] = "auto",
    implementation: Implementation = "auto",
    tokenizer: Path | None = None,
    template: Path | None = None,
) -> None:
    """Raises `ModelError` if the model in `folder` is not supported, there are no weights or no tokenizer, or the chat
    template does not parse or shows no messages.

    The tokenizer's folder may be another one, with a template of its own; `template` is a file that replaces it.
    """
    read_supported(folder, implementation)
    texts = tokenizer or folder
    check_there(texts)
    ChatTemplate.load(texts, special_tokens(texts), template).try_out()
    if load_format != "dummy":
        find_weights(folder, load_format)

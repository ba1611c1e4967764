"""`ServedModel`: what a gateway knows of the model without its weights.

Its names in the API, tokenizer, chat template and sampling defaults, all read at start from the model's folder or, as
to text, from the one that `--tokenizer` names. Limits of the context and the vocabulary come from the engine instead.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.config import GatewayConfig
from services.gateway.faults import UnknownModel
from shared.errors import ConfigError, ModelError, brief
from shared.hub.checkpoint import locate, locate_tokenizer, text_digest
from shared.hub.embedded import EMBEDDED
from shared.text.json_file import parse_object, read_json
from shared.text.sampling_defaults import SamplingDefaults
from shared.text.template import ChatTemplate
from shared.text.tokenizer import Tokenizer


class ServedModel(Struct, frozen=True):
    """The model that requests are for."""

    names: tuple[str, ...]  # the first stands in answers
    root: str  # what it was started with
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults
    digest: str = ""  # of its text: an engine must have loaded the same, if it is known

    @classmethod
    def load(cls, config: GatewayConfig) -> "ServedModel":
        """From the folder that `config` names. Raises `ModelError`."""
        folder = locate(config.model, config.revision, config.download_dir)
        texts = tokenizer_folder(config) or folder
        tokenizer = Tokenizer.load(texts, folder if config.tokenizer else None)
        file = Path(config.chat_template) if config.chat_template else None
        template = ChatTemplate.load(
            texts,
            tokenizer.special,
            file,
            content_format=config.chat_template_content_format,
            variables=json_object("--default-chat-template-kwargs", config.default_chat_template_kwargs),
        )
        template.sanity_check()
        defaults = sampling_defaults(config.generation_config, folder, config.override_generation_config)
        root = config.model or EMBEDDED
        return cls(
            names=tuple(config.served_model_name) or (root,),
            root=root,
            digest=text_digest(folder),
            tokenizer=tokenizer,
            template=template,
            defaults=defaults,
        )

    @property
    def name(self) -> str:
        return self.names[0]

    def check(self, name: str | None) -> None:
        """Raises `UnknownModel` unless `name` is one of ours, or left open."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise UnknownModel(f"the model {brief(name)} does not exist here; there is: {known}", "model")


def tokenizer_folder(config: GatewayConfig) -> Path | None:
    """Return the folder of the tokenizer that the settings name; None if it is the model's. Raises `QuireError`."""
    if config.tokenizer:
        return locate_tokenizer(config.tokenizer, config.tokenizer_revision, config.download_dir)
    if config.tokenizer_revision not in (None, config.revision):
        raise ConfigError("--tokenizer-revision needs --tokenizer, since the model's own has the model's revision")
    return None


def sampling_defaults(source: str, folder: Path, override: str = "") -> SamplingDefaults:
    """Return the defaults that --generation-config names, with the values of --override-generation-config over them.

    Raises `ModelError` for a named file that cannot be read, and `ConfigError` for a value that cannot be used.
    """
    flag = "--override-generation-config"
    demanded = SamplingDefaults.from_override(json_object(flag, override), flag)
    return msgspec.structs.replace(_from_file(source, folder), **demanded.as_dict())


def json_object(flag: str, text: str) -> dict[str, Any]:
    """Return the JSON object that a flag holds; an empty one for ''. Raises `ConfigError`."""
    try:
        return parse_object(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}") from error


def _from_file(source: str, folder: Path) -> SamplingDefaults:
    if source == "vllm":
        return SamplingDefaults()
    if source == "auto":
        return SamplingDefaults.load(folder)
    return SamplingDefaults.from_config(*named_generation_config(source))


def named_generation_config(folder: str) -> tuple[dict[str, Any], Path]:
    """Return what the file in the folder of --generation-config holds, and its path.

    Raises `ModelError` if it is missing or no JSON object.
    """
    path = Path(folder).expanduser() / "generation_config.json"
    if not path.is_file():
        raise ModelError(f"--generation-config {folder}: there is no {path}")
    return read_json(path), path

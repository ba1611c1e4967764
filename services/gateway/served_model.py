"""`ServedModel`: the model as a gateway knows it, without its weights.

It has the model's names in the API, tokenizer, chat template and sampling defaults. They are read at the start from the
model's folder, tokenizer and template from the one that `--tokenizer` names. The engine sends the sizes of context and
vocabulary.
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.config import GatewayConfig
from services.gateway.errors import UnknownModel
from shared.errors import ConfigError, ModelError, brief
from shared.gguf.damage import damage_as_model_error
from shared.hub.checkpoint import locate, locate_tokenizer, text_digest
from shared.hub.embedded import EMBEDDED
from shared.text.grammars import GrammarCompiler
from shared.text.json_file import parse_object, read_json
from shared.text.message_parser import ParserChoice
from shared.text.sampling_defaults import SamplingDefaults
from shared.text.template import ChatTemplate
from shared.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class TextParts(NamedTuple):
    """The parts of a model that make prompts of texts and messages, and that say how to sample by default."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults

    @classmethod
    def load(cls, config: GatewayConfig, folder: Path) -> "TextParts":
        """Read them for the model in `folder`. Raise `ModelError` if they cannot be used, and `ConfigError`."""
        text_folder = tokenizer_folder(config) or folder
        with damage_as_model_error(text_folder):
            return cls._load(config, folder, text_folder)

    @classmethod
    def _load(cls, config: GatewayConfig, folder: Path, text_folder: Path) -> "TextParts":
        tokenizer = Tokenizer.load(text_folder, folder if config.tokenizer else None)
        template = ChatTemplate.load(
            text_folder,
            tokenizer.special,
            config.chat_template,
            content_format=config.chat_template_content_format,
            variables=json_object("--default-chat-template-kwargs", config.default_chat_template_kwargs),
            plain_names=plain_names(config, tokenizer),
        )
        template.sanity_check()
        defaults = sampling_defaults(config.generation_config, folder, config.override_generation_config)
        return cls(tokenizer, template, defaults)


class ServedModel(Struct, frozen=True):
    """The one model that a gateway serves."""

    names: tuple[str, ...]  # responses have the first one
    root: str  # the value of --model
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults
    grammars: GrammarCompiler
    parsers: ParserChoice = ParserChoice()  # of the outputs of chats
    tokenizer_config: Mapping[str, Any] = {}  # of tokenizer_config.json, if the API shows it
    text_digest: str = ""  # of the tokenizer files, which an engine must have too; empty: unknown

    @classmethod
    def load(cls, config: GatewayConfig) -> "ServedModel":
        """Read the folder that `config` names. Raise `ModelError` if it cannot be served."""
        folder = locate(config.model, config.revision, config.download_dir)
        text = TextParts.load(config, folder)
        root = config.model or EMBEDDED
        return cls(
            names=tuple(config.served_model_name) or (root,),
            root=root,
            tokenizer_config=_tokenizer_config(config, folder) if config.enable_tokenizer_info_endpoint else {},
            text_digest=text_digest(folder),
            tokenizer=text.tokenizer,
            template=text.template,
            defaults=text.defaults,
            grammars=GrammarCompiler(text.tokenizer),
            parsers=choose_parsers(config, text.template, text.tokenizer),
        )

    @property
    def name(self) -> str:
        return self.names[0]

    def log_choices(self) -> None:
        """Log the sampling defaults and the parsers, since nobody may have asked for them."""
        if values := self.defaults.as_dict():
            logger.info("sampling defaults: %s", ", ".join(f"{name} {value}" for name, value in values.items()))
        parsers = (("reasoning", self.parsers.reasoning), ("tools", self.parsers.tools))
        if names := [f"{kind} ({name})" for kind, name in parsers if name]:
            logger.info("the outputs of chats are parsed: %s", ", ".join(names))

    def check(self, name: str | None, adapters: Collection[str] = ()) -> None:
        """Raise `UnknownModel` unless `name` is None or one of the names, those of `adapters` included."""
        if name is not None and name not in self.names and name not in adapters:
            served = ", ".join([*self.names, *adapters])
            raise UnknownModel(f"the model {brief(name)} does not exist here; there is: {served}", "model")


def plain_names(config: GatewayConfig, tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens that stay text where a message has their names."""
    return tokenizer.special_names if config.special_tokens_in_messages == "text" else []


def choose_parsers(config: GatewayConfig, template: ChatTemplate, tokenizer: Tokenizer) -> ParserChoice:
    """Return the parsers of tool calls and reasoning for a model. Raise `ConfigError` for unknown ones."""
    return ParserChoice.make(
        template.source, tokenizer, tool_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser
    )


def tokenizer_folder(config: GatewayConfig) -> Path | None:
    """Return the folder of the tokenizer that the settings name, or None for the model's. Raise `QuireError`."""
    if config.tokenizer:
        return locate_tokenizer(config.tokenizer, config.tokenizer_revision, config.download_dir)
    if config.tokenizer_revision not in (None, config.revision):
        raise ConfigError("--tokenizer-revision needs --tokenizer, since the model's own has the model's revision")
    return None


def sampling_defaults(source: str, folder: Path, override: str = "") -> SamplingDefaults:
    """Return the defaults that --generation-config names, with the values of --override-generation-config over them.

    Raise `ModelError` for a named file that cannot be read, and `ConfigError` for a value that cannot be used.
    """
    flag = "--override-generation-config"
    overrides = SamplingDefaults.from_override(json_object(flag, override), flag)
    return msgspec.structs.replace(_from_file(source, folder), **overrides.as_dict())


def json_object(flag: str, text: str) -> dict[str, Any]:
    """Return the JSON object in a flag's value, an empty one for ''. Raise `ConfigError` if it is not one."""
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
    """Return the contents of generation_config.json in the folder of --generation-config, and the file's path.

    Raise `ModelError` if it is missing or not a JSON object.
    """
    path = Path(folder).expanduser() / "generation_config.json"
    if not path.is_file():
        raise ModelError(f"--generation-config {folder}: there is no {path}")
    return read_json(path), path


def _tokenizer_config(config: GatewayConfig, folder: Path) -> dict[str, Any]:
    return read_json((tokenizer_folder(config) or folder) / "tokenizer_config.json")

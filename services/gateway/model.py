"""`ServedModel`: what a gateway knows of the model without its weights.

Its names in the API, tokenizer, chat template and sampling defaults, all read at start from the model's folder or, as
to text, from the one that `--tokenizer` names. Limits of the context and the vocabulary come from the engine instead.
"""

from pathlib import Path

from msgspec import Struct

from services.gateway.config import GatewayConfig
from services.gateway.faults import UnknownModel
from shared.checkpoint import locate, locate_tokenizer, text_digest
from shared.embedded import EMBEDDED
from shared.errors import ConfigError, ModelError, brief
from shared.text.generation import SamplingDefaults
from shared.text.json_file import read_json
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
        template = ChatTemplate.load(texts, tokenizer.special, file)
        template.try_out()
        root = config.model or EMBEDDED
        return cls(
            names=tuple(config.served_model_name) or (root,),
            root=root,
            digest=text_digest(folder),
            tokenizer=tokenizer,
            template=template,
            defaults=sampling_defaults(config.generation_config, folder),
        )

    @property
    def name(self) -> str:
        return self.names[0]

    def check(self, name: str | None) -> None:
        """Raises `UnknownModel` unless `name` is one of ours, or left open."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise UnknownModel(f"the model {brief(name)} is not served here; there is: {known}", "model")


def tokenizer_folder(config: GatewayConfig) -> Path | None:
    """The folder of the tokenizer that the settings name; None if that is the model's. Raises `QuireError`."""
    if config.tokenizer:
        return locate_tokenizer(config.tokenizer, config.tokenizer_revision, config.download_dir)
    if config.tokenizer_revision not in (None, config.revision):
        raise ConfigError("--tokenizer-revision needs --tokenizer, since the model's own has the model's revision")
    return None


def sampling_defaults(source: str, folder: Path) -> SamplingDefaults:
    """By the flag --generation-config. Raises `ModelError` for a file that is named there and cannot be read."""
    if source == "vllm":
        return SamplingDefaults()
    if source == "auto":
        return SamplingDefaults.load(folder)
    path = named_generation_config(source)
    return SamplingDefaults.read(read_json(path), path)


def named_generation_config(folder: str) -> Path:
    """The file that --generation-config names by its folder. Raises `ModelError` if it is missing or no JSON object."""
    path = Path(folder).expanduser() / "generation_config.json"
    if not path.is_file():
        raise ModelError(f"--generation-config {folder}: there is no {path}")
    read_json(path)
    return path

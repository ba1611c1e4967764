"""What `quire serve` says once it serves: where, and a command to try it with."""

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from services.gateway.config import GatewayConfig
from shared.hub.embedded import EMBEDDED
from shared.text.template import ChatTemplate

QUESTION = "What is the capital of France?"


def banner(config: GatewayConfig, folder: Path, seconds: float) -> str:
    """The announcement of a server that became ready after `seconds`, whose chat template is in `folder`."""
    url = "http://localhost" if config.uds else base_url(config.host, config.port)
    place = f"the socket {config.uds}" if config.uds else url
    return (
        f"Quire serves {model_name(config)} at {place} (ready in {seconds:.1f} s). Try:\n\n"
        f"  {curl(config, url, has_chat_template(config, folder))}\n\nCtrl-C stops it.\n"
    )


def model_name(config: GatewayConfig) -> str:
    """The name under which requests ask for the model."""
    return config.served_model_name[0] if config.served_model_name else config.model or EMBEDDED


def base_url(host: str, port: int) -> str:
    """The address at which a client on this machine reaches a server that listens on `host`."""
    name = "localhost" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def curl(config: GatewayConfig, url: str, chat: bool) -> str:
    """A command that asks the model something."""
    prompt = {"messages": [{"role": "user", "content": QUESTION}]} if chat else {"prompt": QUESTION}
    body = json.dumps({"model": model_name(config), **prompt, "max_tokens": 32, "temperature": 0})
    key = f"-H {authorization(config.api_key, os.environ.get('QUIRE_API_KEY'))} " if config.api_key else ""
    path = "chat/completions" if chat else "completions"
    socket = f"--unix-socket {shlex.quote(config.uds)} " if config.uds else ""
    return f"curl -s {socket}{url}/v1/{path} -H 'Content-Type: application/json' {key}-d {shlex.quote(body)}"


def authorization(keys: Sequence[str], variable: str | None) -> str:
    """A header as a shell's word. A key is never shown: it is the user's own variable's, or theirs to put in."""
    return '"Authorization: Bearer ' + ('$QUIRE_API_KEY"' if variable in keys else '<your key>"')


def has_chat_template(config: GatewayConfig, folder: Path) -> bool:
    """Whether the model can chat."""
    return ChatTemplate.load(folder, {}, Path(config.chat_template) if config.chat_template else None).exists

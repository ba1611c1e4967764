"""Makes the text that `quire serve` prints once it is ready: its address, and a command to try."""

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from services.gateway.config import GatewayConfig
from shared.hub.embedded import EMBEDDED
from shared.text.template import ChatTemplate

QUESTION = "What is the capital of Japan?"


def banner(config: GatewayConfig, folder: Path, seconds: float, num_engines: int = 1, num_ranks: int = 1) -> str:
    """Return the text for a server that became ready after `seconds`. `folder` has the chat template.

    It has `num_engines`, of `num_ranks` each.
    """
    command = curl_command(config, _url(config), has_chat_template(config, folder))
    return f"{summary(config, seconds, num_engines, num_ranks)}. Try:\n\n  {command}\n\nCtrl-C stops it.\n"


def summary(config: GatewayConfig, seconds: float, num_engines: int = 1, num_ranks: int = 1) -> str:
    """Return the banner's first sentence."""
    address = f"the socket {config.uds}" if config.uds else _url(config)
    counts = {"engines": num_engines, "ranks": num_ranks}
    sizes = " of ".join(f"{count} {name}" for name, count in counts.items() if count > 1)
    return f"Quire serves {model_name(config)} at {address} (ready in {seconds:.1f} s{sizes and f', {sizes}'})"


def model_name(config: GatewayConfig) -> str:
    """Return the name under which requests ask for the model."""
    return config.served_model_name[0] if config.served_model_name else config.model or EMBEDDED


def _url(config: GatewayConfig) -> str:
    return "http://localhost" if config.uds else base_url(config.host, config.port)


def base_url(host: str, port: int) -> str:
    """Return the address at which a client on this machine reaches a server that listens on `host`."""
    name = "localhost" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def curl_command(config: GatewayConfig, url: str, chat: bool) -> str:
    """Return a curl command that asks the model a question."""
    prompt = {"messages": [{"role": "user", "content": QUESTION}]} if chat else {"prompt": QUESTION}
    body = json.dumps({"model": model_name(config), **prompt, "max_tokens": 32, "temperature": 0})
    key = f"-H {authorization(config.api_key, os.environ.get('QUIRE_API_KEY'))} " if config.api_key else ""
    path = "chat/completions" if chat else "completions"
    socket = f"--unix-socket {shlex.quote(config.uds)} " if config.uds else ""
    return f"curl -s {socket}{url}/v1/{path} -H 'Content-Type: application/json' {key}-d {shlex.quote(body)}"


def authorization(keys: Sequence[str], variable: str | None) -> str:
    """Return the Authorization header as a word of the shell, without the key itself.

    `variable` is the value of QUIRE_API_KEY: if it is one of the keys, the header refers to it.
    """
    return '"Authorization: Bearer ' + ('$QUIRE_API_KEY"' if variable in keys else '<your key>"')


def has_chat_template(config: GatewayConfig, folder: Path) -> bool:
    """Return whether the model has a chat template."""
    return ChatTemplate.load(folder, {}, config.chat_template).exists

"""The settings of `quire serve`: its own, and those of the services it starts, each knob once.

Addresses and the like, which bind the services together, are `quire serve`'s to choose and not the user's: `INTERNAL`.
"""

import json
import os
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from quire import vllm
from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import Knob, knobs, read_file, resolve, to_flags
from shared.errors import ConfigError
from shared.hub.progress import TERMINAL_VARIABLE, on_terminal

INTERNAL = frozenset({"engines", "gateways", "workers", "scheduler", "supervisor", "supervisor_address", "insecure"})

SECRET = frozenset({"api_key"})
"""Travels to the services by environment, since everybody on the machine can read the arguments of a process."""


class ServeConfig(Struct, frozen=True, kw_only=True):
    """Settings of the supervisor itself."""

    hf_token: Annotated[str | None, Meta(description="Token for gated models on Hugging Face; unset: HF_TOKEN.")] = None
    ready_timeout: Annotated[
        float, Meta(gt=0, description="Seconds that loading may take before the start is given up.")
    ] = 600.0


class Settings(NamedTuple):
    """Everything that one server needs to know."""

    serve: ServeConfig
    gateway: GatewayConfig
    scheduler: SchedulerConfig
    worker: WorkerConfig


CONFIGS: tuple[type[Struct], ...] = (GatewayConfig, SchedulerConfig, WorkerConfig, ServeConfig)


def public_knobs() -> list[Knob]:
    """What a user can set, in the order of help and tables; a knob that several services read stands once."""
    found = {knob.name: knob for config in CONFIGS for knob in knobs(config) if knob.name not in INTERNAL}
    return list(found.values())


def public_config() -> type[Struct]:
    """One struct of all public knobs, for the flag parser."""
    fields = [
        (knob.name, knob.type, msgspec.field(default_factory=partial(copy, knob.default))) for knob in public_knobs()
    ]
    return msgspec.defstruct("Knobs", fields, kw_only=True)


def read(
    flags: Mapping[str, Any], environment: Mapping[str, str], note: Callable[[str], None] = lambda line: None
) -> Settings:
    """The settings from flags, environment and the file that `--config` names. Raises `ConfigError`.

    vLLM's settings are put into Quire's words; `note` gets a line for each that is taken without effect.
    """
    own, notes = vllm.translate(flags)
    file, more = _from_file(flags["config"]) if "config" in flags else vllm.Translation({}, [])
    for line in notes + more:
        note(line)
    environment = _with_key_of_vllm(environment)
    return Settings(
        serve=resolve(ServeConfig, own, environment, file),
        gateway=resolve(GatewayConfig, own, environment, file),
        scheduler=resolve(SchedulerConfig, own, environment, file),
        worker=resolve(WorkerConfig, own, environment, file),
    )


def _from_file(path: str) -> vllm.Translation:
    known = {knob.name for knob in public_knobs()}
    translation = vllm.translate(read_file(path), place=f"--config {path}: ")
    for name in translation.settings:
        if name not in known:
            raise ConfigError(f"--config {path}: there is no setting {name}")
    return translation


def _with_key_of_vllm(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Let VLLM_API_KEY protect the server as it does vLLM's, unless Quire's own variable is set."""
    key = environment.get("VLLM_API_KEY", "").strip()
    if not key or environment.get("QUIRE_API_KEY", "").strip():
        return environment
    return {**environment, "QUIRE_API_KEY": json.dumps([key])}


def service_arguments(config: Struct) -> list[str]:
    """A service's command line, without what nobody else may read."""
    fields = {knob.name: knob.default for knob in knobs(type(config)) if knob.name in SECRET}
    return to_flags(msgspec.structs.replace(config, **fields))


def service_environment(settings: Settings) -> dict[str, str]:
    """The services' environment. Of Quire's variables only secrets remain: all else is said by flags, in full."""
    mine = {knob.variable for config in CONFIGS for knob in knobs(config)}
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    if settings.gateway.api_key:
        environment["QUIRE_API_KEY"] = json.dumps(settings.gateway.api_key)  # a key may hold a comma
    if on_terminal():
        environment[TERMINAL_VARIABLE] = "1"
    environment["HF_HUB_OFFLINE"] = "1"  # the start has fetched all; all services shall see that same
    return environment


def markdown_table() -> str:
    """The table of settings for the documentation."""
    rows = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for knob in public_knobs():
        default = "" if knob.default in (None, "", []) else f"`{knob.default}`"
        kind = knob.type_text.replace("|", "\\|")
        rows.append(f"| `{knob.flag}` | `{knob.variable}` | {default} | {knob.doc} ({kind}) |")
    return "\n".join(rows) + "\n"

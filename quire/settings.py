"""Collects the settings of `quire serve`: its own, and those that its services declare.

`INTERNAL` settings connect the services (addresses, ...). `quire serve` chooses them, and users cannot set them.
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
from services.gateway.config import SHARED_METRICS_VARIABLE, GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import MAX_SECONDS, Knob, knobs, read_file, resolve, to_flags
from shared.errors import ConfigError
from shared.hub.progress import TERMINAL_VARIABLE, on_terminal

INTERNAL = frozenset(
    {"engines", "gateways", "workers", "scheduler", "supervisor", "supervisor_address", "zmq_keys", "insecure"}
    | {"probe_uds", "admin_port", "rank", "rendezvous", "local_rank", "local_world_size"}
)

SECRET = frozenset({"api_key"})
"""Settings that the services get by environment, since every user of a machine can read a process's arguments."""


MAX_LOCAL = 256
"""Engines, workers and gateways that one machine may run, of each."""


class ServeConfig(Struct, frozen=True, kw_only=True):
    """Settings of the supervisor itself."""

    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_LOCAL,
            description="Engines on this machine, each with its own weights and KV; they share the CPUs, or have a GPU "
            "for each of their ranks.",
        ),
    ] = 1
    api_server_count: Annotated[
        int, Meta(ge=1, le=MAX_LOCAL, description="Gateways on this machine, which share one port.")
    ] = 1
    hf_token: Annotated[str | None, Meta(description="Token for gated models on Hugging Face; unset: HF_TOKEN.")] = None
    ready_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=MAX_SECONDS,
            description="Seconds that the server may take to become ready; after them, the start fails.",
        ),
    ] = 600.0


class Settings(NamedTuple):
    """The settings of one server."""

    serve: ServeConfig
    gateway: GatewayConfig
    scheduler: SchedulerConfig
    worker: WorkerConfig


CONFIGS: tuple[type[Struct], ...] = (GatewayConfig, SchedulerConfig, WorkerConfig, ServeConfig)


def public_knobs() -> list[Knob]:
    """Return the settings that users may set, each once even if several services read it. `--help` has this order."""
    by_name = {knob.name: knob for config in CONFIGS for knob in knobs(config) if knob.name not in INTERNAL}
    return list(by_name.values())


def public_config() -> type[Struct]:
    """Return a struct with the settings that users may set, for the flag parser."""
    fields = [
        (knob.name, knob.type, msgspec.field(default_factory=partial(copy, knob.default))) for knob in public_knobs()
    ]
    return msgspec.defstruct("Knobs", fields, kw_only=True)


def read(
    flags: Mapping[str, Any], environment: Mapping[str, str], note: Callable[[str], None] = lambda line: None
) -> Settings:
    """Return the settings from flags, environment and the file that `--config` names. Raise `ConfigError`.

    Settings of vLLM are translated. `note` is called with a line for each that is accepted without effect. Variables of
    `INTERNAL` settings are for services that run without `quire serve`, and are ignored.
    """
    translated, notes = vllm.translate(flags)
    file, file_notes = _from_file(flags["config"]) if "config" in flags else vllm.Translation({}, [])
    for line in notes + file_notes:
        note(line)
    internal = {knob.variable for config in CONFIGS for knob in knobs(config) if knob.name in INTERNAL}
    set_variables = {name: value for name, value in environment.items() if value.strip() and name not in internal}
    environment = {**vllm.own_variables(environment), **set_variables}
    return Settings(
        serve=resolve(ServeConfig, translated, environment, file),
        gateway=resolve(GatewayConfig, translated, environment, file),
        scheduler=resolve(SchedulerConfig, translated, environment, file),
        worker=resolve(WorkerConfig, translated, environment, file),
    )


def _from_file(path: str) -> vllm.Translation:
    names = {knob.name for knob in public_knobs()}
    translation = vllm.translate(read_file(path), place=f"--config {path}: ")
    for name in translation.settings:
        if name not in names:
            raise ConfigError(f"--config {path}: there is no setting {name}")
    return translation


def service_arguments(config: Struct) -> list[str]:
    """Return a service's command line, without secrets."""
    fields = {knob.name: knob.default for knob in knobs(type(config)) if knob.name in SECRET}
    return to_flags(msgspec.structs.replace(config, **fields))


def service_environment(settings: Settings) -> dict[str, str]:
    """Return the services' environment. Of Quire's variables it has only secrets; flags carry the rest."""
    environment = bare_environment()
    if settings.gateway.api_key:
        environment["QUIRE_API_KEY"] = json.dumps(settings.gateway.api_key)  # a key may hold a comma
    if on_terminal() and settings.gateway.log_format == "text":
        environment[TERMINAL_VARIABLE] = "1"
    return environment


def bare_environment() -> dict[str, str]:
    """Return this process's environment for services, without Quire's variables."""
    own_variables = {knob.variable for config in CONFIGS for knob in knobs(config)}
    environment = {name: value for name, value in os.environ.items() if name not in own_variables}
    environment.pop(SHARED_METRICS_VARIABLE, None)  # another server's
    environment["HF_HUB_OFFLINE"] = "1"  # everything is downloaded by now, and all services must see the same files
    return environment


def markdown_table() -> str:
    """Return the table of settings for the documentation."""
    rows = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for knob in public_knobs():
        default = "" if knob.default in (None, "", []) else f"`{knob.default}`"
        type_text = knob.type_text.replace("|", "\\|")
        rows.append(f"| `{knob.flag}` | `{knob.variable}` | {default} | {knob.doc} ({type_text}) |")
    return "\n".join(rows) + "\n"

"""The settings of `quire serve`: its own, and those of the services it starts, each knob once.

Addresses and the like, which bind the services together, are `quire serve`'s to choose and not the user's: `INTERNAL`.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import Knob, arguments, knobs, read_file, resolve
from shared.errors import ConfigError
from shared.progress import VARIABLE, on_terminal

INTERNAL = frozenset({"engines", "gateways", "workers", "scheduler", "supervisor", "supervisor_address", "insecure"})

SECRET = frozenset({"api_key"})
"""Travels to the services by environment, since everybody on the machine can read the arguments of a process."""


class ServeConfig(Struct, frozen=True, kw_only=True):
    """Settings of the supervisor itself."""

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
    fields = [(knob.name, knob.type, knob.default) for knob in public_knobs()]
    return msgspec.defstruct("Knobs", fields, kw_only=True)


def read(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """The settings from flags, environment and the file that `--config` names. Raises `ConfigError`."""
    if "config" in flags:
        known = {knob.name for knob in public_knobs()}
        for name in read_file(flags["config"]):
            if name not in known:
                raise ConfigError(f"--config {flags['config']}: there is no setting {name}")
    return Settings(
        serve=resolve(ServeConfig, flags, environment),
        gateway=resolve(GatewayConfig, flags, environment),
        scheduler=resolve(SchedulerConfig, flags, environment),
        worker=resolve(WorkerConfig, flags, environment),
    )


def service_arguments(config: Struct) -> list[str]:
    """A service's command line, without what nobody else may read."""
    fields = {knob.name: knob.default for knob in knobs(type(config)) if knob.name in SECRET}
    return arguments(msgspec.structs.replace(config, **fields))


def service_environment(settings: Settings) -> dict[str, str]:
    """The services' environment. Of Quire's variables only secrets remain: all else is said by flags, in full."""
    mine = {knob.variable for config in CONFIGS for knob in knobs(config)}
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    if settings.gateway.api_key:
        environment["QUIRE_API_KEY"] = ",".join(settings.gateway.api_key)
    if on_terminal():
        environment[VARIABLE] = "1"
    environment["HF_HUB_OFFLINE"] = "1"  # the start has fetched all; all services shall see that same
    return environment


def markdown_table() -> str:
    """The table of settings for the documentation."""
    rows = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for knob in public_knobs():
        default = "" if knob.default in (None, "", []) else f"`{knob.default}`"
        kind = knob.kind.replace("|", "\\|")
        rows.append(f"| `{knob.flag}` | `{knob.variable}` | {default} | {knob.doc} ({kind}) |")
    return "\n".join(rows) + "\n"

"""`AdapterLoads`: the loads of adapters that somebody waits for: the start of the engine, or gateways.

The engine decides what is loaded when, and names each load by a number. This keeps who asked for it. An adapter that
`--lora-modules` names must load, or the scheduler ends; it welcomes no gateway before all of them are loaded.
"""

import logging
from collections.abc import Sequence

from services.scheduler.engine import Engine
from services.scheduler.gateways import AdapterRequest, Gateways
from services.scheduler.lora_modules import LoraModule
from shared.errors import ConfigError
from shared.protocol import AdapterLoaded, AdapterRefused, AddAdapter, ProgressRow

logger = logging.getLogger(__name__)


class AdapterLoads:
    """Who waits for which load."""

    def __init__(self, modules: Sequence[LoraModule], gateways: Gateways) -> None:
        self._to_add = list(modules)
        self._gateways = gateways
        self._waiting: dict[int, list[AdapterRequest | LoraModule]] = {}  # by the adapters' numbers
        self._done: list[tuple[AdapterRequest, str]] = []  # what `answer` answers, with why it failed

    @property
    def starting(self) -> bool:
        """True until all adapters of the start are loaded."""
        return bool(self._to_add) or any(isinstance(askers[0], LoraModule) for askers in self._waiting.values())

    def begin(self, engine: Engine) -> None:
        """Have the adapters of the start loaded, the first time that there is a worker. Raise `ConfigError`."""
        modules, self._to_add = self._to_add, []
        for module in modules:
            added = engine.add_adapter(module.name, module.path)
            if isinstance(added, str):
                raise ConfigError(f"{module}: {added}")
            self._waiting[added] = [module]

    def handle(self, engine: Engine, request: AdapterRequest) -> None:
        """Do what a gateway asks for, or begin it."""
        message = request.message
        if not isinstance(message, AddAdapter):
            self._done.append((request, engine.remove_adapter(message.name)))
            return
        for askers in self._waiting.values():
            if _target(askers[0]) == (message.name, message.path):
                askers.append(request)  # gateways load what an engine has lost, and do so together
                return
        added = engine.add_adapter(message.name, message.path, replaces=message.replaces)
        if isinstance(added, str):
            self._done.append((request, added))
        else:
            self._waiting[added] = [request]

    def finish(self, engine: Engine, answer: AdapterLoaded | AdapterRefused) -> list[ProgressRow]:
        """Apply a worker's answer. Return the last rows of requests whose adapter cannot be loaded again.

        Raise `ConfigError` if the start needs an adapter that cannot be loaded.
        """
        rows = engine.finish_load(answer)
        error = answer.detail if isinstance(answer, AdapterRefused) else ""
        for asker in self._waiting.pop(answer.adapter, ()):
            if isinstance(asker, AdapterRequest):
                self._done.append((asker, error))
            elif error:
                raise ConfigError(f"{asker}: {error}")
        return rows

    def answer(self) -> None:
        """Answer the gateways for which something was done since the last call.

        They must know the engine's adapters by then: whoever reads the answer may name the adapter at once.
        """
        for request, error in self._done:
            self._gateways.answer_adapter(request, error)
        self._done.clear()


def _target(asker: AdapterRequest | LoraModule) -> tuple[str, str]:
    """Return the name and the path of what is being loaded."""
    if isinstance(asker, LoraModule):
        return asker.name, asker.path
    assert isinstance(asker.message, AddAdapter), "nobody waits for a removal"
    return asker.message.name, asker.message.path

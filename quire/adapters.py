"""`Adapters`: the adapters that an `LLM` has loaded, by the names under which its calls choose them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace

from quire.arguments import check_type
from quire.engine import InProcessEngine
from quire.lora_request import LoRARequest
from shared.errors import InvalidRequest, brief

AdapterChoice: TypeAlias = str | LoRARequest | None
"""An adapter by its name, one that is loaded if it is not yet, or none."""

AdapterSet: TypeAlias = Mapping[str, str | Path] | Sequence[str | Path | LoRARequest]
"""Folders by name, or a list of folders, whose last part is the name, and of `LoRARequest`s."""

FORMS = "a mapping of names to paths, or a list of paths and LoRARequests"


class Adapters:
    """The adapters of one engine."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._engine = engine
        self._by_name: dict[str, LoRARequest] = {}

    def set(self, adapters: AdapterSet) -> None:
        """Load these adapters and forget all others. Raise `InvalidRequest` if one cannot be loaded.

        What comes before that one in the list is loaded then, and nothing is forgotten.
        """
        requested = _read_set(adapters)
        for request in requested.values():
            former = self._by_name.get(request.lora_name)
            replaces = request.load_inplace or (former is not None and former.lora_path != request.lora_path)
            if former is None or replaces:
                self._load(request, replaces=replaces)
            self._by_name[request.lora_name] = request
        for name in [name for name in self._by_name if name not in requested]:
            self._engine.remove_adapter(name)
            del self._by_name[name]

    def for_prompts(self, lora_request: Any, num_prompts: int) -> list[LoRARequest | None]:
        """Return the adapter of each prompt, loaded. Raise `InvalidRequest` for one that cannot be used."""
        if isinstance(lora_request, (list, tuple)):
            if len(lora_request) != num_prompts:
                reason = f"there are {num_prompts} prompts, but {len(lora_request)} adapters"
                raise InvalidRequest(reason, "lora_request")
            choices = {id(choice): choice for choice in lora_request}  # one that is to be loaded in place is so once
            used = {key: self._use(choice) for key, choice in choices.items()}
            return [used[id(choice)] for choice in lora_request]
        return [self._use(lora_request)] * num_prompts

    def _use(self, choice: Any) -> LoRARequest | None:
        if choice is None or (choice == {} and isinstance(choice, dict)):
            return None
        if isinstance(choice, str):
            if choice not in self._by_name:
                names = ", ".join(self._by_name) or "none; LLM.set_adapters loads them"
                raise InvalidRequest(f"there is no adapter {brief(choice)}; there is: {names}", "lora_request")
            return self._by_name[choice]
        check_type("lora_request", choice, LoRARequest, "a name, a LoRARequest, or a list of one for each prompt")
        return self._use_request(choice)

    def _use_request(self, request: LoRARequest) -> LoRARequest:
        former = self._by_name.get(request.lora_name)
        if former is not None and not request.load_inplace:
            if (former.lora_path, former.lora_int_id) != (request.lora_path, request.lora_int_id):
                raise InvalidRequest(
                    f"the adapter {request.lora_name!r} is loaded from {former.lora_path} with the id "
                    f"{former.lora_int_id}; load_inplace=True would replace it",
                    "lora_request",
                )
            return former
        for other in self._by_name.values():
            if other.lora_int_id == request.lora_int_id and other.lora_name != request.lora_name:
                reason = f"the id {request.lora_int_id} is that of the adapter {other.lora_name!r}"
                raise InvalidRequest(reason, "lora_request")
        self._load(request, replaces=request.load_inplace)
        self._by_name[request.lora_name] = replace(request, load_inplace=False)
        return request

    def _load(self, request: LoRARequest, *, replaces: bool) -> None:
        if error := self._engine.add_adapter(request.lora_name, request.lora_path, replaces=replaces):
            raise InvalidRequest(f"the adapter {request.lora_name!r} cannot be loaded: {error}", "lora_request")


def _read_set(adapters: Any) -> dict[str, LoRARequest]:
    """Return the adapters of a call of `set_adapters` by name. Those without an id get the lowest free ones."""
    check_type("adapters", adapters, (Mapping, Sequence), FORMS)
    if isinstance(adapters, (str, bytes)):
        raise InvalidRequest(f"adapters must be {FORMS}, got {brief(adapters)}", "adapters")
    entries: list[Any] = list(adapters.items()) if isinstance(adapters, Mapping) else list(adapters)
    taken = {entry.lora_int_id for entry in entries if isinstance(entry, LoRARequest)}
    free = (id for id in range(1, 2 * len(entries) + 1) if id not in taken)
    requested: dict[str, LoRARequest] = {}
    for entry in entries:
        request = entry if isinstance(entry, LoRARequest) else _named(entry, next(free))
        if request.lora_name in requested:
            raise InvalidRequest(f"there are two adapters with the name {request.lora_name!r}", "adapters")
        requested[request.lora_name] = request
    return requested


def _named(entry: Any, id: int) -> LoRARequest:
    name, path = entry if isinstance(entry, tuple) else (None, entry)
    if not isinstance(path, (str, Path)) or not isinstance(name, (str, type(None))):
        raise InvalidRequest(f"adapters must be {FORMS}, got {brief(entry)}", "adapters")
    return LoRARequest(name or Path(path).name, id, str(path))

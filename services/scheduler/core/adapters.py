"""`Adapters`: the adapters (LoRA) that requests can name, those in the worker's host memory, and those in its slots.

An adapter is one load of a folder under a name. It has a number that is never used again, so what is loaded later under
the same name is another adapter: requests of the former one go on with it, and share no cached block with the new one.

    added ──> named ──> retired           whether new requests can name it
    absent ──> loading ──> loaded         whether the worker has it in host memory: at most `max_cpu_loras` that are not
                             └──> slot    absent, and at most `max_loras` of those in a slot, which rows can use

Rules that hold between any two calls:

- Sequences *hold* the adapter of their request from their admission until no plan in flight names them. What is held
  keeps its slot, so a slot never changes under a plan in flight. What is idle is in a slot until another needs that.
- An adapter in a slot is loaded. One that others need the memory of is unloaded only while nobody holds it.
- The first sequence in the order that lacks its adapter has a *claim*: one idle slot is kept for it, and if all slots
  are held, one is drained, of which no sequence behind the claim is admitted. It may also have any idle adapter
  unloaded. Other sequences have an adapter loaded only in place of one that no request uses.
"""

from collections import deque
from enum import Enum

from shared.protocol import AdapterInfo, LoadAdapter, UnloadAdapter

MAX_ADAPTERS = 2048
"""Adapters of an engine at a time. Gateways are told of all of them in one message, which must fit `MAX_FRAME`."""


class Host(Enum):
    """Says whether the worker has an adapter in host memory."""

    ABSENT = "absent"
    LOADING = "loading"  # it was told to load it, and has not answered
    LOADED = "loaded"


class Adapter:
    """One load of an adapter. `Adapters` owns it."""

    __slots__ = (
        "digest",
        "host",
        "is_retired",
        "last_used",
        "name",
        "num_holders",
        "num_requests",
        "number",
        "path",
        "slot",
    )

    def __init__(self, number: int, name: str, path: str) -> None:
        self.number = number
        self.name = name
        self.path = path
        self.digest = ""  # of its files; empty until it was loaded for the first time
        self.host = Host.ABSENT
        self.slot = -1  # of the worker; -1: it is in none
        self.num_requests = 0  # unfinished ones that use it
        self.num_holders = 0  # sequences that hold it
        self.last_used = 0  # a counter
        self.is_retired = False  # new requests cannot name it

    def __repr__(self) -> str:
        return f"<Adapter {self.number} {self.name!r} {self.host.value} slot={self.slot} held by {self.num_holders}>"


class Adapters:
    """The adapters of one engine. It has no worker until `begin_epoch`."""

    def __init__(self) -> None:
        self.max_loras = 0  # slots
        self._max_cpu_loras = 0
        self._named: dict[str, Adapter] = {}  # those that requests can name
        self._all: dict[int, Adapter] = {}  # by number: those, the added ones, and retired ones that requests use
        self._added: deque[Adapter] = deque()  # never loaded, and waiting for host memory
        self._slots: list[Adapter | None] = []
        self._num_held = 0  # adapters that sequences hold
        self._draining: Adapter | None = None  # held; no sequence behind a claim is admitted to it
        self._messages: list[LoadAdapter | UnloadAdapter] = []  # to the worker, not taken yet
        self._next_number = 1
        self._uses = 0  # the last value of `last_used`

    @property
    def infos(self) -> list[AdapterInfo]:
        """The adapters that requests can name."""
        return [AdapterInfo(adapter.name, adapter.path, adapter.digest) for adapter in self._named.values()]

    @property
    def held_names(self) -> list[str]:
        """The names of the adapters that sequences hold."""
        held = [adapter.name for adapter in self._slots if adapter is not None and adapter.num_holders]
        return list(dict.fromkeys(held))

    def find(self, name: str, digest: str = "") -> Adapter | None:
        """Return the adapter that requests name so; None if there is none, or if its files have not that `digest`."""
        adapter = self._named.get(name)
        return adapter if adapter is not None and digest in ("", adapter.digest) else None

    def add(self, name: str, path: str, *, replaces: bool) -> "Adapter | str":
        """Have an adapter loaded, which requests can name then. Return it, or why it cannot be added.

        With `replaces`, it takes the place of one of the same name, if there is one.
        """
        if not self.max_loras:
            return "the engine takes no adapters: its worker has no --enable-lora"
        if not name or not path:
            return "an adapter needs a name and a path"
        if name in self._named and not replaces:
            return f"there is an adapter {name!r} already"
        if any(not adapter.digest and adapter.name == name for adapter in self._all.values()):
            return f"an adapter {name!r} is being loaded"
        if len(self._all) >= MAX_ADAPTERS:
            return f"there are {MAX_ADAPTERS} adapters already"
        adapter = Adapter(self._next_number, name, path)
        self._next_number += 1
        self._all[adapter.number] = adapter
        self._added.append(adapter)
        self.load_added()
        return adapter

    def remove(self, name: str) -> str:
        """Let no new request name an adapter. Return why that cannot be done; empty if it was."""
        adapter = self._named.pop(name, None)
        if adapter is None:
            return f"there is no adapter {name!r}"
        self._retire(adapter)
        return ""

    def note_loaded(self, number: int, digest: str) -> "Adapter | None":
        """Note that the worker has loaded an adapter. Return it if its files are not those of its first load.

        Then it can be named no more, and its requests have to be ended.
        """
        adapter = self._answered(number)
        if adapter is None:
            return None
        adapter.host = Host.LOADED
        if adapter.digest and adapter.digest != digest:
            self._withdraw(adapter)
            return adapter
        if not adapter.digest:
            adapter.digest = digest
            if (former := self._named.pop(adapter.name, None)) is not None:
                self._retire(former)
            self._named[adapter.name] = adapter
        self._touch(adapter)
        self._drop_if_unused(adapter)
        self.load_added()
        return None

    def note_refused(self, number: int) -> "Adapter | None":
        """Note that the worker cannot load an adapter, which can be named no more. Return it; its requests must end."""
        adapter = self._answered(number)
        if adapter is None:
            return None
        adapter.host = Host.ABSENT
        self._withdraw(adapter)
        self.load_added()
        return adapter

    def begin_epoch(self, max_loras: int, max_cpu_loras: int) -> None:
        """Have a new worker, which has none yet, load as many as it has memory for: those in use first."""
        self.max_loras, self._max_cpu_loras = max_loras, max_cpu_loras
        self._slots = [None] * max_loras
        self.load_added()
        for adapter in sorted(self._all.values(), key=lambda adapter: (not adapter.num_requests, -adapter.last_used)):
            self.prefetch(adapter)

    def reset(self) -> None:
        """Forget the worker. No sequence may hold an adapter."""
        self._max_cpu_loras = 0
        self._slots = [None] * self.max_loras
        self._added.clear()
        for adapter in list(self._all.values()):
            adapter.host, adapter.slot = Host.ABSENT, -1
            if not adapter.digest:
                self._added.append(adapter)
            self._drop_if_unused(adapter)
        self._messages.clear()

    @property
    def has_added(self) -> bool:
        """True if an adapter that was added waits for host memory. The next plan may have it loaded."""
        return bool(self._added)

    @property
    def has_messages(self) -> bool:
        """True if `take_messages` would return any."""
        return bool(self._messages)

    def take_messages(self) -> list[LoadAdapter | UnloadAdapter]:
        """Return the messages that the worker has to get before the next plan."""
        messages, self._messages = self._messages, []
        return messages

    def begin_request(self, adapter: Adapter | None) -> None:
        """Note a request, which may use an adapter."""
        if adapter is not None:
            adapter.num_requests += 1
            self.prefetch(adapter)

    def end_request(self, adapter: Adapter | None) -> None:
        """Note the end of a request."""
        if adapter is not None:
            adapter.num_requests -= 1
            self._drop_if_unused(adapter)

    def hold(self, adapter: Adapter | None) -> None:
        """Note that a sequence is admitted. If it uses an adapter, that must be in a slot."""
        if adapter is not None:
            self._num_held += not adapter.num_holders
            adapter.num_holders += 1
            self._touch(adapter)

    def release(self, adapter: Adapter | None) -> None:
        """Note that a sequence has left its slot, and no plan in flight names it."""
        if adapter is None:
            return
        adapter.num_holders -= 1
        if not adapter.num_holders:
            self._num_held -= 1
            if adapter is self._draining:
                self._draining = None
            self._touch(adapter)
            self._drop_if_unused(adapter)

    def is_available(self, adapter: Adapter | None, *, claimed: bool) -> bool:
        """Return whether a sequence that uses `adapter` could run now. `claimed`: one before it has a claim."""
        if adapter is None:
            return True
        if adapter.num_holders:
            return adapter is not self._draining or not (claimed or self._added)
        return adapter.host is Host.LOADED and self._num_idle > claimed

    def claim(self, adapter: Adapter | None) -> None:
        """Get an adapter ready for the first sequence in the order that lacks it."""
        assert adapter is not None, "a sequence without an adapter lacks none"
        if adapter.host is Host.ABSENT and self._make_room(may_be_in_use=True):
            self._load(adapter)
        if not self._num_idle:
            self._drain()

    def assign_slot(self, adapter: Adapter) -> None:
        """Put an adapter that is available into a slot: an empty one, or else that of the idle one not used longest."""
        empty = next((slot for slot, other in enumerate(self._slots) if other is None), None)
        if empty is None:
            idle = [other for other in self._slots if other is not None and not other.num_holders]
            victim = min(idle, key=lambda other: other.last_used)
            empty, victim.slot = victim.slot, -1
        self._slots[empty], adapter.slot = adapter, empty

    def prefetch(self, adapter: Adapter) -> None:
        """Have an adapter loaded if it is absent and takes the place of no other that requests use."""
        if adapter.host is Host.ABSENT and adapter.digest and self._make_room(may_be_in_use=False):
            self._load(adapter)

    def load_added(self) -> None:
        """Have those loaded that were added, as far as there is memory. If all of it is held, drain a slot for them."""
        while self._added and self._make_room(may_be_in_use=True):
            self._load(self._added.popleft())
        if self._added and self._num_held == self._num_in_host and self._num_held:
            self._drain()

    @property
    def _num_idle(self) -> int:
        """The number of slots that are empty, or whose adapter nobody holds."""
        return self.max_loras - self._num_held

    @property
    def _num_in_host(self) -> int:
        return sum(adapter.host is not Host.ABSENT for adapter in self._all.values())

    def _drain(self) -> None:
        """Choose the slot to drain, unless one is drained already."""
        if self._draining is None:
            held = [adapter for adapter in self._slots if adapter is not None and adapter.num_holders]
            self._draining = min(held, key=lambda adapter: (adapter.num_holders, adapter.slot), default=None)

    def _make_room(self, *, may_be_in_use: bool) -> bool:
        """Return whether the worker can load one more, after unloading an idle one if that is needed.

        `may_be_in_use`: the idle one may be of requests that wait.
        """
        if self._num_in_host < self._max_cpu_loras:
            return True
        idle = [adapter for adapter in self._all.values() if adapter.host is Host.LOADED and not adapter.num_holders]
        unloadable = [adapter for adapter in idle if may_be_in_use or not adapter.num_requests]
        if not unloadable:
            return False
        self._unload(min(unloadable, key=lambda adapter: (adapter.num_requests > 0, adapter.last_used)))
        return True

    def _load(self, adapter: Adapter) -> None:
        adapter.host = Host.LOADING
        self._messages.append(LoadAdapter(adapter.number, adapter.path))

    def _unload(self, adapter: Adapter) -> None:
        if adapter.slot >= 0:
            self._slots[adapter.slot] = None
        adapter.host, adapter.slot = Host.ABSENT, -1
        self._messages.append(UnloadAdapter(adapter.number))

    def _answered(self, number: int) -> Adapter | None:
        """Return the adapter of an answer; None if nothing was asked about it."""
        adapter = self._all.get(number)
        return adapter if adapter is not None and adapter.host is Host.LOADING else None

    def _withdraw(self, adapter: Adapter) -> None:
        """Let nobody use an adapter that cannot be loaded any more."""
        if self._named.get(adapter.name) is adapter:
            del self._named[adapter.name]
        self._retire(adapter)

    def _retire(self, adapter: Adapter) -> None:
        adapter.is_retired = True
        self._drop_if_unused(adapter)

    def _drop_if_unused(self, adapter: Adapter) -> None:
        """Forget a retired adapter that no request and no sequence uses, and have it unloaded."""
        if not adapter.is_retired or adapter.num_requests or adapter.num_holders or adapter.host is Host.LOADING:
            return
        if adapter.host is Host.LOADED:
            self._unload(adapter)
        self._all.pop(adapter.number, None)

    def _touch(self, adapter: Adapter) -> None:
        self._uses += 1
        adapter.last_used = self._uses

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return f"<Adapters {list(self._all.values())!r}, {self._num_idle} of {self.max_loras} slots idle>"

"""Tests the core with adapters (LoRA): who passes whom, what is cached for whom, and what is loaded when.

All run with the page-memory oracle: a slot that holds another adapter, or a block of one, changes a token.
"""

import msgspec
import pytest
from mutants import CORE, mutated
from simulated_engine import SimulatedEngine
from simulated_worker import VOCABULARY

from services.scheduler.core import Limits
from services.scheduler.core.adapters import MAX_ADAPTERS, Adapter, Adapters
from shared.protocol import (
    MAX_FRAME,
    MAX_SHORT_TEXT,
    AdapterInfo,
    FinishReason,
    Refusal,
    Refused,
    Sampling,
    Submit,
    pack_tokens,
)

PATH_MAX = 4096
"""Linux's maximum number of bytes of a path."""

LIMITS = Limits(
    num_blocks=200, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=400, max_queued_requests=100
)


def _prompt(length: int) -> list[int]:
    return [index * index % VOCABULARY for index in range(length)]


def _engine(*names: str, max_loras: int = 1, max_cpu_loras: int = 0) -> SimulatedEngine:
    """Return an engine that has loaded adapters of these names."""
    engine = SimulatedEngine(LIMITS, max_loras=max_loras, max_cpu_loras=max_cpu_loras or max(max_loras, len(names)))
    for index, name in enumerate(names):
        engine.adapters.files["/" + name] = index + 1
        assert isinstance(engine.add_adapter(name, "/" + name), int)
        while engine.adapters.answers:
            engine.deliver_load()
    return engine


def _finish_reason(engine: SimulatedEngine, id: int) -> FinishReason | None:
    return engine.clients[id, 0].finish_reason


def _cached(engine: SimulatedEngine, id: int) -> int:
    return engine.clients[id, 0].cached_tokens


def _flood(engine: SimulatedEngine, adapter: str, steps: int) -> None:
    """Run steps in which two sequences of an adapter or more are always there, since each comes before one ends."""
    for _ in range(steps):
        if engine.core.snapshot().running + engine.core.snapshot().waiting < 3:
            engine.accept(_prompt(4), 12, adapter=adapter)
        engine.step()


def test_each_adapter_finds_its_own_blocks_and_no_others() -> None:
    """PFX-02."""
    engine = _engine("a", "b", max_loras=2)
    order = ["", "a", "b", "a", ""]
    ids = []
    for adapter in order:
        ids.append(engine.accept(_prompt(20), 8, adapter=adapter, seed=1))
        engine.run(100)
    assert [_cached(engine, id) for id in ids] == [0, 0, 0, 19, 19]
    at_once = [engine.accept(_prompt(20), 8, adapter=adapter, seed=1) for adapter in order]
    engine.run(100)
    assert [_cached(engine, id) for id in at_once] == [19] * 5
    outputs = {adapter: tuple(engine.clients[id, 0].output) for adapter, id in zip(order, ids, strict=True)}
    assert len(set(outputs.values())) == 3, "the adapters differ"
    engine.check_finished()


def test_the_number_of_adapters_is_bounded() -> None:
    adapters = Adapters()
    adapters.begin_epoch(1, 1)
    for number in range(MAX_ADAPTERS):
        assert isinstance(adapters.add(str(number), "/a", replaces=False), Adapter)
        adapters.note_loaded(number + 1, "d")
    assert adapters.add("one more", "/a", replaces=False) == f"there are {MAX_ADAPTERS} adapters already"
    assert not adapters.remove("0")
    assert isinstance(adapters.add("one more", "/a", replaces=False), Adapter)
    longest = "\U0001f600" * MAX_SHORT_TEXT
    assert MAX_ADAPTERS * len(msgspec.msgpack.encode(AdapterInfo(longest, "/" * PATH_MAX, "d" * 64))) < MAX_FRAME


def test_what_is_loaded_later_under_a_name_shares_nothing_with_what_was_there() -> None:
    """PFX-03."""
    engine = _engine("a", max_loras=2, max_cpu_loras=2)
    first = engine.accept(_prompt(20), 8, adapter="a")
    engine.run(100)
    engine.adapters.files["/other"] = 77
    assert engine.add_adapter("a", "/other") == "there is an adapter 'a' already"
    long = engine.accept(_prompt(20), 100, adapter="a")
    for _ in range(5):
        engine.step()
    assert engine.add_adapter("a", "/other", replaces=True) == 2
    assert engine.add_adapter("a", "/other", replaces=True) == "an adapter 'a' is being loaded"
    engine.step()
    second = engine.accept(_prompt(20), 8, adapter="a")
    engine.run(300)
    assert [_cached(engine, id) for id in (first, long, second)] == [0, 19, 0]
    assert [(info.name, info.path, info.digest) for info in engine.core.adapters] == [("a", "/other", "digest of 77")]
    assert list(engine.worker.loaded) == [2], "the former one is unloaded with its last request"  # type: ignore[union-attr]
    engine.check_finished()


def test_the_same_folder_loaded_again_is_another_adapter() -> None:
    engine = _engine("a", max_cpu_loras=2)
    engine.accept(_prompt(20), 4, adapter="a")
    engine.run(100)
    engine.add_adapter("a", "/a", replaces=True)
    engine.deliver_load()
    again = engine.accept(_prompt(20), 4, adapter="a")
    engine.run(100)
    assert _cached(engine, again) == 0


def test_a_request_that_waits_for_its_adapter_holds_up_no_others() -> None:
    engine = _engine("a", "b")
    long = engine.accept(_prompt(4), 60, adapter="a")
    engine.step()
    waiting = engine.accept(_prompt(4), 4, adapter="b")
    plain = [engine.accept(_prompt(4), 4) for _ in range(3)]
    for _ in range(8):
        engine.step()
    state = engine.core.snapshot()
    assert (state.adapters_running, state.adapters_waiting, state.max_loras) == (["a"], ["b"], 1)
    assert (state.waiting, state.waiting_deferred) == (1, 1), "it waits for something other than memory"
    assert all(_finish_reason(engine, id) is not None for id in plain)
    assert _finish_reason(engine, long) is _finish_reason(engine, waiting) is None
    engine.run(100)
    engine.check_finished()


def test_an_idle_slot_is_given_to_the_adapter_that_waits_first() -> None:
    """Others that come with a third adapter wait behind it, even if their adapter is loaded and its one is not."""
    engine = _engine("a", "b", "c", max_loras=1, max_cpu_loras=2)
    long = engine.accept(_prompt(4), 30, adapter="b")
    engine.step()
    first = engine.accept(_prompt(4), 4, adapter="a")
    second = engine.accept(_prompt(4), 4, adapter="c")
    while _finish_reason(engine, first) is None:
        assert _finish_reason(engine, second) is None
        engine.step()
    assert _finish_reason(engine, long) is not None
    engine.run(100)
    engine.check_finished()


def test_what_waits_for_a_slot_is_not_unloaded_for_those_behind() -> None:
    engine = _engine("a", "b", "c", max_loras=1, max_cpu_loras=2)
    engine.accept(_prompt(4), 30, adapter="a")
    for _ in range(3):
        engine.step()
    engine.accept(_prompt(4), 4, adapter="b")
    for _ in range(3):
        engine.step()
    engine.accept(_prompt(4), 4, adapter="c")
    assert [name for name, number in engine.adapters.named.items() if number in engine.worker.loaded] == ["a", "b"]  # type: ignore[union-attr]
    engine.run(100)
    engine.check_finished()


STARVING = {
    "a claim drains no slot": [("adapters:Adapters.claim", "self._drain()", "pass")],
    "a drained slot takes more": [
        ("adapters:Adapters.is_available", "adapter is not self._draining or not (claimed or self._added)", "True"),
    ],
}


def _wait_beside_a_stream_of_others() -> bool:
    """Return whether a request is served while requests of another adapter, which has the only slot, never cease."""
    engine = _engine("a", "b")
    _flood(engine, "a", 20)
    waiting = engine.accept(_prompt(4), 4, adapter="b")
    _flood(engine, "a", 60)
    return _finish_reason(engine, waiting) is not None


def test_others_that_never_cease_starve_no_adapter() -> None:
    assert _wait_beside_a_stream_of_others()


@pytest.mark.parametrize("name", STARVING)
def test_without_draining_they_would(name: str) -> None:
    with mutated(CORE, STARVING[name]), pytest.raises(AssertionError):
        assert _wait_beside_a_stream_of_others()


def _load_beside_a_stream_of_others() -> bool:
    """Return whether an adapter is loaded while another one, for which the only memory is, is always in use."""
    engine = _engine("a")
    engine.adapters.files["/b"] = 2
    _flood(engine, "a", 20)
    engine.add_adapter("b", "/b")
    _flood(engine, "a", 60)
    return "b" in engine.adapters.named


def test_an_adapter_is_loaded_while_others_are_always_in_use() -> None:
    assert _load_beside_a_stream_of_others()
    with mutated(CORE, [("adapters:Adapters.load_added", "self._drain()", "pass")]):
        assert not _load_beside_a_stream_of_others()


def test_samples_that_a_fork_starts_use_the_adapter_of_their_parent() -> None:
    engine = _engine("a", "b")
    engine.accept(_prompt(10), 20, n=4, adapter="a")
    engine.accept(_prompt(10), 5, n=3, adapter="b")
    engine.run(200)
    engine.check_finished()
    assert engine.events["forks"] == 2


def test_a_plan_looks_once_at_all_that_lack_the_same_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may wait for an adapter, in front of others that could run."""
    engine = _engine("a", "b")
    engine.accept(_prompt(10), 100, adapter="a")
    engine.step()
    for _ in range(30):
        engine.accept(_prompt(4), 4, adapter="b")
    last = engine.accept(_prompt(4), 4)
    looked_at: list[Adapter | None] = []
    is_available = Adapters.is_available

    def note(self: Adapters, adapter: Adapter | None, *, claimed: bool) -> bool:
        looked_at.append(adapter)
        return is_available(self, adapter, claimed=claimed)

    monkeypatch.setattr(Adapters, "is_available", note)
    engine.step()
    assert [None if adapter is None else adapter.name for adapter in looked_at] == ["b", None]
    engine.run(300)
    assert _finish_reason(engine, last) is FinishReason.LENGTH
    engine.check_finished()


def test_a_request_that_names_no_adapter_of_this_engine_is_refused() -> None:
    engine = _engine("a")
    refused = engine.submit(_prompt(4), 4, adapter="b")
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == (Refusal.UNKNOWN_ADAPTER, "there is no adapter 'b'")
    engine.remove_adapter("a")
    assert isinstance(engine.submit(_prompt(4), 4, adapter="a"), Refused)
    assert engine.remove_adapter("a") == "there is no adapter 'a'"


def test_output_goes_on_only_with_the_files_that_computed_it() -> None:
    """A gateway may not know yet that an adapter has been replaced since its last engine died."""
    engine = _engine("a")
    (info,) = engine.core.adapters
    refusals = [
        engine.core.submit(
            Submit(id, pack_tokens([1, 2, 3]), 2, Sampling(4, 0), adapter="a", adapter_digest=digest), engine.now
        )
        for id, digest in enumerate(("", info.digest, "others"))
    ]
    assert refusals == [
        None,
        None,
        Refused(2, Refusal.UNKNOWN_ADAPTER, "there is no adapter 'a' of the files that have computed the output"),
    ]


def test_requests_of_a_removed_adapter_go_on_with_it_through_a_workers_death() -> None:
    engine = _engine("a")
    running = engine.accept(_prompt(10), 40, adapter="a")
    for _ in range(5):
        engine.step()
    engine.remove_adapter("a")
    engine.lose_worker()
    engine.begin_epoch()
    engine.run(200)
    assert _finish_reason(engine, running) is FinishReason.LENGTH
    assert engine.worker is not None
    assert not engine.worker.loaded
    engine.check_finished()


def test_a_new_worker_loads_what_is_in_use_first() -> None:
    engine = _engine("a", "b", "c", "d", max_loras=2, max_cpu_loras=2)
    engine.accept(_prompt(10), 40, adapter="a")
    engine.accept(_prompt(10), 40, adapter="c")
    for _ in range(4):
        engine.step()
    engine.lose_worker()
    engine.begin_epoch()
    assert [engine.adapters.names[number] for number, _ in engine.adapters.answers] == ["c", "a"]
    engine.run(200)
    engine.check_finished()


@pytest.mark.parametrize(("content", "reason"), [(None, "there is no such folder"), (99, "its files have changed")])
def test_requests_end_if_their_adapter_cannot_be_loaded_again(content: int | None, reason: str) -> None:
    """The others go on, and later requests cannot name it."""
    engine = _engine("a", "b", max_loras=2)
    lost = engine.accept(_prompt(10), 40, n=2, adapter="a")
    others = [engine.accept(_prompt(10), 40, adapter=adapter) for adapter in ("b", "")]
    for _ in range(5):
        engine.step()
    details = []
    engine._on_rows = lambda rows: details.extend(row.detail for row in rows if row.detail)
    engine.adapters.files.pop("/a")
    if content is not None:
        engine.adapters.files["/a"] = content
    engine.lose_worker()
    engine.begin_epoch()
    engine.run(200)
    assert [_finish_reason(engine, id) for id in (lost, *others)] == [FinishReason.ERROR, *[FinishReason.LENGTH] * 2]
    assert details == [f"the adapter 'a' cannot be loaded again: {reason}"] * 2
    assert [info.name for info in engine.core.adapters] == ["b"]
    engine.check_finished()


def test_an_adapter_that_cannot_be_loaded_changes_nothing() -> None:
    engine = _engine("a", max_cpu_loras=2)
    running = engine.accept(_prompt(10), 20, adapter="a")
    engine.step()
    added = engine.add_adapter("a", "/missing", replaces=True)
    assert added == 2
    engine.deliver_load()
    assert [info.path for info in engine.core.adapters] == ["/a"]
    engine.run(100)
    assert _finish_reason(engine, running) is FinishReason.LENGTH
    assert engine.add_adapter("b", "/a") == 3, "numbers go on"


def test_an_engine_whose_worker_takes_none_takes_none() -> None:
    engine = SimulatedEngine(LIMITS)
    assert engine.add_adapter("a", "/a") == "the engine takes no adapters: its worker has no --enable-lora"


def test_an_adapter_that_comes_without_a_worker_is_loaded_by_the_next() -> None:
    engine = _engine("a", max_cpu_loras=2)
    engine.adapters.files["/b"] = 2
    engine.lose_worker()
    engine.add_adapter("b", "/b")
    assert engine.core.take_adapter_messages() == []
    engine.begin_epoch()
    while engine.adapters.answers:
        engine.deliver_load()
    assert set(engine.adapters.named) == {"a", "b"}


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    engine = _engine("a")
    assert engine.core.adapter_loaded(1, "another digest") == []
    assert engine.core.adapter_refused(1, "no") == []
    assert engine.core.adapter_loaded(5, "unknown") == []
    assert [info.digest for info in engine.core.adapters] == ["digest of 1"]


def test_a_request_has_an_absent_adapter_loaded_at_once_if_nobody_uses_another() -> None:
    engine = _engine("a", "b", max_loras=1, max_cpu_loras=1)
    engine.accept(_prompt(4), 4, adapter="a")
    assert [content for _, content in engine.adapters.answers] == [1], "b was loaded last, and nobody uses it"
    engine.run(100)
    engine.check_finished()

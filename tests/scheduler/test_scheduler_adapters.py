"""Adapters between gateways, the scheduler and its worker: who is told what, in which order."""

from typing import Any

import pytest
from msgspec.structs import replace

from services.scheduler.config import SchedulerConfig
from services.scheduler.engine import Engine
from services.scheduler.lora_modules import LoraModule, parse_lora_modules
from services.scheduler.registration import incompatibility
from shared.errors import ConfigError
from shared.protocol import (
    MAX_SHORT_TEXT,
    AdapterAnswer,
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    AddAdapter,
    FinishReason,
    LoadAdapter,
    Progress,
    Refusal,
    Refused,
    RemoveAdapter,
    StepPlan,
    UnloadAdapter,
    Welcome,
    decode_to_gateway,
)
from tests.scheduler.examples import REGISTER, submit
from tests.scheduler.scheduler_harness import GOOD, SPARE, WORKER, SchedulerHarness

WITH_ADAPTERS = replace(REGISTER, max_loras=1, max_cpu_loras=2)
TOO_LONG = "a" * (MAX_SHORT_TEXT + 1)


class AdapterHarness(SchedulerHarness):
    """A scheduler with a gateway and a worker that takes adapters. It keeps what they were sent."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.gateway = self.connect(GOOD)
        self.to_gateway: list[Any] = []
        self.to_worker: list[Any] = []
        self.worker = self.register(WORKER, WITH_ADAPTERS)
        self.configured(WORKER, self.worker)
        self.read()

    def read(self) -> None:
        self.turn()
        self.to_worker += self.sent_to(WORKER)
        self.to_gateway += self.gateways.take(GOOD, decode_to_gateway)

    def from_gateway(self, message: object) -> None:
        self.gateways.hear(GOOD, message, self.gateway)
        self.read()

    def from_worker(self, message: object) -> None:
        self.workers.hear(WORKER, message, self.worker)
        self.read()

    def load(self, id: int, name: str, *, number: int, replaces: bool = False) -> None:
        self.from_gateway(AddAdapter(id, name, "/" + name, replaces))
        self.from_worker(AdapterLoaded(number, f"d{number}"))

    @property
    def adapters(self) -> list[list[AdapterInfo]]:
        """The adapters of each welcome."""
        return [message.adapters for message in self.to_gateway if isinstance(message, Welcome)]

    @property
    def answers(self) -> list[AdapterAnswer]:
        return [message for message in self.to_gateway if isinstance(message, AdapterAnswer)]

    @property
    def about_adapters(self) -> list[LoadAdapter | UnloadAdapter]:
        return [message for message in self.to_worker if isinstance(message, LoadAdapter | UnloadAdapter)]


A = AdapterInfo("a", "/a", "d1")
B = AdapterInfo("b", "/b", "d2")


def test_an_adapter_is_loaded_told_of_and_answered() -> None:
    harness = AdapterHarness()
    assert harness.adapters == [[]]
    harness.from_gateway(AddAdapter(7, "a", "/a"))
    assert harness.about_adapters == [LoadAdapter(1, "/a")]
    assert not harness.answers
    harness.from_worker(AdapterLoaded(1, "d1"))
    assert harness.adapters == [[], [A]]
    assert harness.answers == [AdapterAnswer(7)]


def test_an_adapter_that_is_refused_changes_nothing() -> None:
    harness = AdapterHarness()
    harness.load(1, "a", number=1)
    harness.from_gateway(AddAdapter(8, "a", "/other", True))
    harness.from_worker(AdapterRefused(2, "no such folder"))
    harness.from_gateway(AddAdapter(9, "a", "/other"))
    harness.from_gateway(RemoveAdapter(10, "b"))
    assert harness.answers[1:] == [
        AdapterAnswer(8, "no such folder"),
        AdapterAnswer(9, "there is an adapter 'a' already"),
        AdapterAnswer(10, "there is no adapter 'b'"),
    ]
    assert harness.adapters == [[], [A]]


def test_an_adapter_that_is_removed_is_unloaded_and_cannot_be_named() -> None:
    harness = AdapterHarness()
    harness.load(1, "a", number=1)
    harness.from_gateway(RemoveAdapter(2, "a"))
    assert harness.answers[1:] == [AdapterAnswer(2)]
    assert harness.adapters == [[], [A], []]
    assert harness.about_adapters[1:] == [UnloadAdapter(1)]
    harness.from_gateway(replace(submit(3), adapter="a"))
    assert [message for message in harness.to_gateway if isinstance(message, Refused)] == [
        Refused(3, Refusal.UNKNOWN_ADAPTER, "there is no adapter 'a'")
    ]


def test_gateways_know_of_a_change_before_it_is_answered() -> None:
    """A client that has the answer may name the adapter at once."""
    harness = AdapterHarness()
    harness.load(1, "a", number=1)
    harness.load(2, "a", number=2, replaces=True)
    harness.from_gateway(RemoveAdapter(3, "a"))
    told = [type(message) for message in harness.to_gateway if isinstance(message, Welcome | AdapterAnswer)]
    assert told == [Welcome] + 3 * [Welcome, AdapterAnswer]


def test_the_worker_hears_of_an_adapter_before_the_plan_that_uses_it() -> None:
    harness = AdapterHarness()
    harness.load(1, "a", number=1)
    harness.load(2, "b", number=2)
    harness.load(3, "c", number=3)
    harness.from_gateway(replace(submit(4), adapter="a"))
    assert harness.about_adapters[4:] == [UnloadAdapter(2), LoadAdapter(1, "/a")], "the oldest gave way to c before"
    assert not any(isinstance(message, StepPlan) for message in harness.to_worker)
    harness.from_worker(AdapterLoaded(1, "d1"))
    plan = next(message for message in harness.to_worker if isinstance(message, StepPlan))
    assert plan.adapter_slots == [(0, 1)]
    assert [new.adapter_slot for new in plan.new_sequences] == [0]


def test_a_new_worker_loads_them_again_and_those_that_are_gone_end_their_requests() -> None:
    harness = AdapterHarness()
    harness.load(1, "a", number=1)
    harness.load(2, "b", number=2)
    for id, adapter in ((3, "a"), (4, "b")):
        harness.from_gateway(replace(submit(id), adapter=adapter))
    harness.workers.leave(harness.worker)
    harness.turn()
    spare = harness.register(SPARE, WITH_ADAPTERS)
    harness.configured(SPARE, spare)
    harness.turn()
    loads = [message for message in harness.sent_to(SPARE) if isinstance(message, LoadAdapter)]
    assert loads == [LoadAdapter(1, "/a"), LoadAdapter(2, "/b")], "that which was in a slot comes first"
    harness.workers.hear(SPARE, AdapterLoaded(2, "d2"), spare)
    harness.workers.hear(SPARE, AdapterRefused(1, "no such folder"), spare)
    harness.turn()
    for _ in range(10):
        harness.answer(SPARE, spare)
        harness.read()
    rows = [row for message in harness.to_gateway if isinstance(message, Progress) for row in message.rows]
    ends = {row.id: (row.finish_reason, row.detail) for row in rows if row.finish_reason is not None}
    assert ends == {
        3: (FinishReason.ERROR, "the adapter 'a' cannot be loaded again: no such folder"),
        4: (FinishReason.LENGTH, ""),
    }
    assert harness.adapters[-1] == [B]


def test_a_worker_that_takes_no_adapters_does_not_replace_one_that_does() -> None:
    harness = AdapterHarness()
    harness.register(SPARE)
    harness.workers.leave(harness.worker)
    harness.turn()
    assert not harness.service._workers.ready
    assert not harness.service._workers.has_spare


def test_adapters_may_come_with_a_later_worker() -> None:
    engine = Engine(SchedulerConfig(), REGISTER)
    for worker in (REGISTER, WITH_ADAPTERS):
        assert not engine.mismatch(worker)
        engine.configure(worker)
    assert engine.mismatch(REGISTER) == "it takes no adapters, but this engine has some"


def test_without_an_engine_or_without_adapters_there_is_a_reason() -> None:
    harness = SchedulerHarness()
    gateway = harness.connect(GOOD)
    harness.gateways.hear(GOOD, AddAdapter(1, "a", "/a"), gateway)
    harness.turn()
    harness.configured(WORKER, harness.register(WORKER))
    harness.gateways.hear(GOOD, AddAdapter(2, "a", "/a"), gateway)
    harness.turn()
    answers = [
        message for message in harness.gateways.take(GOOD, decode_to_gateway) if isinstance(message, AdapterAnswer)
    ]
    assert [answer.error for answer in answers] == [
        "the engine has not started yet",
        "the engine takes no adapters: its worker has no --enable-lora",
    ]


def test_gateways_are_welcomed_when_the_adapters_of_the_start_are_loaded() -> None:
    harness = AdapterHarness(lora_modules=["a=/a", '{"name": "b", "path": "/b", "base_model_name": "m"}'])
    assert harness.about_adapters == [LoadAdapter(1, "/a"), LoadAdapter(2, "/b")]
    harness.from_worker(AdapterLoaded(1, "d1"))
    assert harness.adapters == []
    harness.from_worker(AdapterLoaded(2, "d2"))
    assert harness.adapters == [[A, B]]


def test_the_adapters_of_the_start_are_loaded_through_a_workers_death() -> None:
    harness = AdapterHarness(lora_modules=["a=/a"])
    harness.workers.leave(harness.worker)
    harness.turn()
    spare = harness.register(SPARE, WITH_ADAPTERS)
    harness.configured(SPARE, spare)
    harness.turn()
    assert [message for message in harness.sent_to(SPARE) if isinstance(message, LoadAdapter)] == [LoadAdapter(1, "/a")]
    harness.workers.hear(SPARE, AdapterLoaded(1, "d1"), spare)
    harness.read()
    assert harness.adapters == [[A]]


def test_an_adapter_of_the_start_that_cannot_be_loaded_ends_it() -> None:
    harness = AdapterHarness(lora_modules=["a=/a"])
    with pytest.raises(ConfigError, match=r"^--lora-modules a=/a: no such folder$"):
        harness.from_worker(AdapterRefused(1, "no such folder"))
    without = SchedulerHarness(lora_modules=["a=/a"])
    fd = without.register(WORKER)
    without.configured(WORKER, fd)
    with pytest.raises(ConfigError, match="the engine takes no adapters"):
        without.turn()


def test_lora_modules_come_in_vllms_forms() -> None:
    values = ["a=/x=y", ' {"name": "b", "path": "org/repo"}']
    assert parse_lora_modules(values) == [LoraModule("a", "/x=y"), LoraModule("b", "org/repo")]


def test_the_longest_names_that_messages_carry_are_taken() -> None:
    name = "a" * MAX_SHORT_TEXT
    assert parse_lora_modules([f"{name}={name}"]) == [LoraModule(name, name)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["a"], "must be NAME=PATH"),
        (["=/a"], "needs a name and a path"),
        (["a="], "needs a name and a path"),
        (["a=/a", "a=/b"], "names 'a' twice"),
        (['{"name": "a"}'], "missing required field `path`"),
        (['{"name": "a", "path": "b", "rank": 4}'], "unknown field `rank`"),
        (["{"], "--lora-modules {"),
        ([f"{TOO_LONG}=/a"], "names and paths have at most 4096 characters"),
        ([f"a=/{TOO_LONG}"], "names and paths have at most 4096 characters"),
    ],
)
def test_other_lora_modules_are_refused(values: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("{", r"\{")):
        parse_lora_modules(values)


def test_a_worker_with_impossible_numbers_of_adapters_is_refused() -> None:
    assert not incompatibility(WITH_ADAPTERS)
    assert "adapters" in incompatibility(replace(REGISTER, max_loras=3, max_cpu_loras=2))
    assert "adapters" in incompatibility(replace(REGISTER, max_loras=3, max_cpu_loras=2**31 - 1))

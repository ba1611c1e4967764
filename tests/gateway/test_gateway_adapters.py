"""Adapters (LoRA) in the API: requests choose one by their model, and clients load and unload them."""

import asyncio
from array import array
from typing import Any, cast

import pytest

from services.gateway.engine_connection import EngineConnection
from services.gateway.engine_request import EngineRequest
from services.gateway.metrics import EngineLosses
from shared.errors import InvalidRequest, Unavailable
from shared.protocol import (
    VERSION,
    AdapterAnswer,
    AdapterInfo,
    AddAdapter,
    ModelInfo,
    ProgressRow,
    Refusal,
    Refused,
    RemoveAdapter,
    Sampling,
    Welcome,
)
from tests.gateway.fakes import FakeBackend, serve
from tests.gateway.test_gateway_backend import FakeEngine, backend_of

A, OTHER_A = AdapterInfo("a", "/adapters/a", "d1"), AdapterInfo("a", "/adapters/a", "d2")
B = AdapterInfo("b", "/adapters/b", "d3")
PROMPT = array("i", [1, 2, 3])
SAMPLING = Sampling(max_tokens=9, seed=4)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def with_adapters() -> FakeBackend:
    backend = FakeBackend()
    backend.adapters = {"a": A, "b": B}
    return backend


async def test_a_request_chooses_an_adapter_by_its_model() -> None:
    backend = with_adapters()
    async with serve(backend, served_model_name=["base"]) as client:
        for model in ("a", "base", "b", None):
            expected = model or "base"
            assert (await client.complete(prompt="one", model=model))["model"] == expected
            assert (await client.chat(model=model))["model"] == expected
            assert {chunk["model"] for chunk in await client.stream_chat(model=model)} == {expected}
            assert {chunk["model"] for chunk in await client.stream_completion(prompt="x", model=model)} == {expected}
            assert (await client.respond(model=model))["model"] == expected
            assert (await client.stream_response(model=model))[-1]["response"]["model"] == expected
        for path in ("/tokenize", "/detokenize"):
            async with client.post(path, json={"model": "a", "prompt": "one", "tokens": [1]}) as response:
                assert response.status == 200
    assert [request.adapter for request in backend.requests[:24]] == ["a"] * 6 + [""] * 6 + ["b"] * 6 + [""] * 6


async def test_models_are_listed_with_their_adapters() -> None:
    async with serve(with_adapters(), served_model_name=["base", "alias"]) as client:
        async with client.get("/v1/models") as response:
            cards = (await response.json())["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
            ("base", "tiny", None),
            ("alias", "tiny", None),
            ("a", "/adapters/a", "base"),
            ("b", "/adapters/b", "base"),
        ]
        async with client.get("/v1/models/b") as response:
            assert await response.json() == cards[3]
        status, error = await client.refused("/v1/completions", {"model": "c", "prompt": "x"})
        assert (status, error["param"]) == (404, "model")
        assert error["message"] == "the model 'c' does not exist here; there is: base, alias, a, b"
        async with client.get("/v1/models/c") as response:
            assert response.status == 404


async def test_before_an_engine_has_answered_no_name_is_unknown() -> None:
    backend = FakeBackend()
    backend.welcome = None
    async with serve(backend) as client:
        status, _ = await client.refused("/v1/completions", {"model": "a", "prompt": "x"})
        assert status == 503


async def test_clients_load_and_unload_adapters() -> None:
    backend = FakeBackend()
    async with serve(backend, enable_lora_runtime_updates=True) as client:
        for body, digest in (({}, "new"), ({"load_inplace": True}, "replaced"), ({"load_inplace": False}, "new")):
            async with client.post(LOAD, json={"lora_name": "a", "lora_path": "/adapters/a"} | body) as response:
                assert response.status == 200
                assert await response.text() == "Success: LoRA adapter 'a' added successfully."
            assert backend.adapters == {"a": AdapterInfo("a", "/adapters/a", digest)}
        assert await client.complete(prompt="one", model="a")
        async with client.post(UNLOAD, json={"lora_name": "a"}) as response:
            assert await response.text() == "Success: LoRA adapter 'a' removed successfully."
        assert await client.refused("/v1/completions", {"model": "a", "prompt": "x"})
        status, error = await client.refused(UNLOAD, {"lora_name": "a"})
        assert (status, error["message"], error["param"]) == (404, "there is no adapter 'a'", "lora_name")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_path": "/a"}, "lora_name"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path"),
        ({"lora_name": "a" * 4097, "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "/" * 4097}, "lora_path"),
        ({"lora_name": "tiny", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "/a", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        ({"lora_name": "a", "lora_path": 5}, "lora_path"),
    ],
)
async def test_a_wrong_body_changes_nothing(body: dict[str, Any], param: str) -> None:
    backend = FakeBackend()
    async with serve(backend, enable_lora_runtime_updates=True) as client:
        status, error = await client.refused(LOAD, body)
        assert (status, error["param"]) == (400, param)
    assert not backend.adapters


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequest("no such folder", "lora_path"), 400), (Unavailable("it was lost"), 503)]
)
async def test_what_engines_say_is_the_answer(error: Exception, status: int) -> None:
    backend = FakeBackend()
    backend.adapter_error = error
    async with serve(backend, enable_lora_runtime_updates=True) as client:
        answer = await client.refused(LOAD, {"lora_name": "a", "lora_path": "/a"})
        assert (answer[0], answer[1]["message"]) == (status, str(error))


async def test_without_the_flag_nobody_changes_adapters() -> None:
    async with serve(with_adapters()) as client:
        for path in (LOAD, UNLOAD):
            assert (await client.refused(path, {"lora_name": "a", "lora_path": "/a"}))[0] == 404


async def test_a_request_goes_to_an_engine_that_has_its_adapter() -> None:
    engines = [FakeEngine("0"), FakeEngine("1", adapters=[A]), FakeEngine("2", adapters=[B])]
    with backend_of(*engines) as backend:
        assert backend.adapters == {"a": A, "b": B}
        for _ in range(3):
            async with backend.submit(PROMPT, SAMPLING, adapter="b") as request:
                assert request.engine == "2"
        async with backend.submit(PROMPT, SAMPLING, adapter="c") as request:
            assert not request.engine, "it waits"
    assert {submit.adapter for submit in engines[2].submits} == {"b"}


@pytest.mark.parametrize(
    ("other", "has_output", "moves"), [(A, True, True), (OTHER_A, True, False), (OTHER_A, False, True)]
)
async def test_output_goes_on_only_with_the_adapter_that_began_it(
    other: AdapterInfo, has_output: bool, moves: bool
) -> None:
    first, second = FakeEngine("0", adapters=[A]), FakeEngine("1", adapters=[other])
    second.ready = False
    with backend_of(first, second) as backend:
        async with backend.submit(PROMPT, SAMPLING, adapter="a") as request:
            request.accept()
            if has_output:
                request.add(ProgressRow(0, 0, 0, [7]))
            second.ready = True
            backend._connections.pop(0)
            request.lose(first)
            await asyncio.sleep(0)
            assert second.requests == ([request] if moves else [])
            assert [submit.adapter_digest for submit in first.submits] == [""], "any files may begin an output"
            assert [submit.adapter_digest for submit in second.submits] == [A.digest if has_output else ""] * moves


async def test_a_later_part_of_a_request_names_the_files_that_the_earlier_one_had() -> None:
    """Its engine may have replaced the adapter by then, and the gateway not know it yet."""
    engine = FakeEngine("0", adapters=[A])
    with backend_of(engine) as backend:
        async with backend.submit(PROMPT, SAMPLING, adapter="a") as first:
            first.accept()
            engine.adapters["a"] = OTHER_A
            later = backend.begin(PROMPT, SAMPLING, adapter="a", output=array("i", [7]), after=first)
            assert not later.engine, "it waits for an engine that has them"
            engine.adapters["a"] = A
            backend._place_waiting()
            assert later.engine == "0"
            backend.end(later)
    assert [submit.adapter_digest for submit in engine.submits] == ["", A.digest]


class Connection(EngineConnection):
    """A connection without a socket. It keeps what it sends."""

    def __init__(self) -> None:
        losses, nothing = EngineLosses(), cast(Any, None)
        super().__init__(
            nothing,
            "ipc://engine",
            text_digest="",
            short_of_cpu=lambda now: False,
            on_status=lambda engine: None,
            keys=None,
            losses=losses,
        )
        self.sent: list[Any] = []

    def _send(self, message: Any) -> None:
        self.sent.append(message)

    def greet(self, *adapters: AdapterInfo, boot_id: str = "1") -> None:
        self._handle(Welcome(VERSION, "0", boot_id, ModelInfo("", "", "", 0, 0, ""), 100, 8, list(adapters)))


async def test_an_engine_answers_what_it_is_asked() -> None:
    connection = Connection()
    with pytest.raises(Unavailable, match="not connected"):
        await connection.add_adapter("a", "/a", replaces=False)
    connection.greet()
    adding = asyncio.create_task(connection.add_adapter("a", "/a", replaces=True))
    removing = asyncio.create_task(connection.remove_adapter("b"))
    await asyncio.sleep(0)
    add, remove = connection.sent
    assert (add, remove) == (AddAdapter(add.id, "a", "/a", True), RemoveAdapter(remove.id, "b"))
    connection._handle(AdapterAnswer(remove.id, "there is no adapter 'b'"))
    connection._handle(AdapterAnswer(add.id))
    assert await asyncio.gather(adding, removing) == ["", "there is no adapter 'b'"]
    connection._handle(AdapterAnswer(add.id, "late"))


async def test_an_engine_that_comes_back_is_given_the_adapters_that_it_had() -> None:
    connection = Connection()
    connection.greet(A, B)
    connection.greet(A, B, boot_id="1")
    assert not connection.sent
    connection.welcome = None  # it is lost
    assert set(connection.adapters) == {"a", "b"}, "their requests wait for it"
    connection.greet(B, boot_id="2")
    (add,) = connection.sent
    assert add == AddAdapter(add.id, "a", A.path)
    assert set(connection.adapters) == {"a", "b"}
    assert [connection.has_adapter(name) for name in ("a", "b")] == [False, True]
    connection.greet(B, A, boot_id="2")
    connection._handle(AdapterAnswer(add.id))
    assert connection.has_adapter("a")
    connection.greet(B, boot_id="2")
    assert set(connection.adapters) == {"b"}, "another gateway has removed it"
    assert len(connection.sent) == 1


async def test_an_adapter_that_cannot_be_loaded_again_is_forgotten() -> None:
    connection = Connection()
    connection.greet(A)
    connection.greet(boot_id="2")
    (add,) = connection.sent
    connection._handle(AdapterAnswer(add.id, "no such folder"))
    assert not connection.adapters


@pytest.mark.parametrize("boot_id", ["2", "3"])
async def test_an_answer_that_was_lost_with_its_connection_is_asked_for_again(boot_id: str) -> None:
    """Otherwise the gateway would take for ever what it asked for as what the engine has."""
    connection = Connection()
    connection.greet(A)
    connection.greet(boot_id="2")
    connection.welcome = None  # it is lost before it answers
    connection.greet(boot_id=boot_id)
    first, second = connection.sent
    assert (first, second) == (AddAdapter(first.id, "a", A.path), AddAdapter(second.id, "a", A.path))
    assert set(connection.adapters) == {"a"}, "its requests wait for it"
    connection._handle(AdapterAnswer(second.id, "no such folder"))
    connection.greet(B, boot_id=boot_id)
    assert set(connection.adapters) == {"b"}


async def test_an_engine_may_not_know_the_adapter_any_more() -> None:
    """A new request is refused; one that was accepted before waits for an engine that has it."""
    for accepted in (False, True):
        unplaced: list[EngineRequest] = []
        connection, request = Connection(), EngineRequest(PROMPT, SAMPLING, adapter="a", on_unplaced=unplaced.append)
        connection.greet(A)
        request.accepted = accepted
        connection.place(request)
        (submit,) = connection.sent
        connection._handle(Refused(submit.id, Refusal.UNKNOWN_ADAPTER, "there is no adapter 'a'"))
        assert unplaced == ([request] if accepted else [])
        if not accepted:
            with pytest.raises(InvalidRequest, match="there is no adapter"):
                await request.rows()


async def test_a_failure_at_one_engine_is_undone_at_the_others() -> None:
    class Loading(FakeEngine):
        """An engine that answers with `error`."""

        error: str | Exception = ""

        async def add_adapter(self, name: str, path: str, *, replaces: bool) -> str:
            if isinstance(self.error, Exception):
                raise self.error
            if not self.error:
                self.adapters[name] = AdapterInfo(name, path)
            return self.error

        async def remove_adapter(self, name: str) -> str:
            del self.adapters[name]
            return ""

    for error, kind in (("no such folder", InvalidRequest), (Unavailable("it was lost"), Unavailable)):
        engines = [Loading("0"), Loading("1")]
        engines[1].error = error
        with backend_of(*engines) as backend:
            with pytest.raises(kind, match=str(error)):
                await backend.add_adapter("a", "/a", replaces=False)
            assert not backend.adapters
            engines[1].error = ""
            await backend.add_adapter("a", "/a", replaces=False)
            assert all("a" in engine.adapters for engine in engines)
            await backend.remove_adapter("a")
            assert not backend.adapters
    with backend_of() as backend, pytest.raises(Unavailable, match="no engine"):
        await backend.add_adapter("a", "/a", replaces=False)

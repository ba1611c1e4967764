"""Tests the fields that demand a form of the output: which grammar reaches the engine, and what is refused."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from shared.protocol import NOTHING_LEFT, FinishReason, ProgressRow
from shared.structured_outputs import StructuredOutputsParams
from shared.text.grammars import grammar_text
from tests.gateway.fakes import EOS, FakeBackend, FakeEngineRequest, says, serve
from tests.gateway.test_gateway_client import CHAT, ask
from tests.gateway.test_gateway_limits import PATHS, body, refuses

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
FREE_FORMAT = {"format": {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}}


def strictly(strict: bool | None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "strict": strict, "schema": SCHEMA}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "demand"),
    [
        ({"response_format": FORMAT}, {"json": SCHEMA}),
        *(({"response_format": strictly(strict)}, {"json": SCHEMA}) for strict in (True, False, None)),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "structural_tag"} | TAGS}, {"structural_tag": TAGS}),
        ({"response_format": {"type": "structural_tag"} | FREE_FORMAT}, {"structural_tag": FREE_FORMAT}),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json": SCHEMA}),
        ({"structured_outputs": {"regex": "[ab]"}}, {"regex": "[ab]"}),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, {"grammar": 'root ::= "x"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, {"structural_tag": TAGS}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {"json": SCHEMA, "disable_any_whitespace": True},
        ),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, {"json": SCHEMA, "whitespace_pattern": " "}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "x"'}, {"grammar": 'start: "x"'}),
    ],
    ids=str,
)
async def test_a_demand_reaches_the_engine(path: str, fields: dict[str, Any], demand: dict[str, Any]) -> None:
    """GDD-10."""
    backend = FakeBackend()
    async with serve(backend) as client, client.post(path, json=body(path, ignore_eos=True, n=2) | fields) as response:
        assert response.status == 200, await response.text()
        assert "X-Quire-Ignored-Fields" not in response.headers
    (request,) = backend.requests
    assert request.sampling.grammar == grammar_text(StructuredOutputsParams(**demand))
    assert request.sampling.stop_token_ids == [EOS], "an output that is whole has to end"


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_demand_there_is_no_grammar(path: str) -> None:
    backend = FakeBackend()
    fields = {"response_format": {"type": "text"}, "structured_outputs": None, "guided_json": None}
    async with serve(backend) as client, client.post(path, json=body(path) | fields) as response:
        assert response.status == 200
    assert backend.requests[0].sampling.grammar == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ({"response_format": {}}, "response_format.type", "got None"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "must be a text",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "must be a JSON schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}},
            "response_format",
            "strng",
        ),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex", "only one of"),
        ({"structured_outputs": {}}, "structured_outputs", "got none"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "got json and regex"),
        ({"structured_outputs": {"no_such": 1}}, "structured_outputs", "no_such"),
        ({"structured_outputs": {"choice": "abc"}}, "structured_outputs", "choice"),
        ({"structured_outputs": {"regex": "(?<=a)b"}}, "structured_outputs", "look-around"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
        ({"structured_outputs": 7}, "structured_outputs", "object"),
    ],
    ids=str,
)
async def test_a_wrong_demand_is_refused(
    path: str, stream: bool, fields: dict[str, Any], param: str, words: str
) -> None:
    """GDD-01, GDD-02, GDD-10, STR-10: with a status of its own, in a stream too."""
    backend = FakeBackend()
    async with serve(backend) as client:
        await refuses(client, path, body(path, stream=stream) | fields, param, words)
    assert len(backend.requests) == 1, "the good one that comes after it"


async def test_the_official_client_parses_an_answer() -> None:
    class Thing(BaseModel):
        a: int
        tags: list[str] = []

    backend = FakeBackend(says('{"a": 12, "tags": ["x"]}'))
    answer = await ask(backend, lambda client: client.chat.completions.parse(**CHAT, response_format=Thing))
    assert answer.choices[0].message.parsed == Thing(a=12, tags=["x"])
    assert '"additionalProperties":false' in backend.requests[0].sampling.grammar.replace(" ", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_demands_that_exclude_each_other_are_the_clients_fault(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Only the engine sees it, and at any token. No other engine is to blame, and none is tried."""
    row = ProgressRow(1, 0, 0, [], finish_reason=FinishReason.ERROR, detail=NOTHING_LEFT)
    monkeypatch.setattr(FakeEngineRequest, "_row", lambda *_: row)
    body = {"prompt": "hi", "guided_choice": ["yes"], "bad_words": ["yes"], "stream": stream}
    async with serve() as client, client.post("/v1/completions", json=body) as response:
        text = await response.text()
    assert response.status == (200 if stream else 400)
    error = json.loads(text.removeprefix("data: ").partition("\n")[0])["error"]
    assert (error["code"], error["type"]) == (400, "BadRequestError")
    assert all(name in error["message"] for name in ("bad_words", "allowed_token_ids", "grammar"))

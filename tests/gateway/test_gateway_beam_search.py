"""Tests of beam search through the API: what it answers and refuses, and that nothing of it stays."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from services.gateway import beam_request
from services.gateway.engine_request import Interruption
from shared.beam_params import BeamSettings
from shared.beam_search import Beam, BeamSearch, FinishedBeam
from shared.errors import EngineFailure, Overloaded
from shared.protocol import FinishReason, ProgressRow, Sampling, SchedulingInfo, TokenLogprobs
from shared.text.sampling_defaults import SamplingDefaults
from tests.gateway.fakes import (
    EOS,
    MODEL,
    TOKENIZER,
    VOCAB,
    FakeBackend,
    ends,
    error_of,
    ids,
    serve,
    texts,
)
from tests.gateway.test_gateway_metrics import figures
from tests.text.vocabulary import CHATML
from tests.toy_model import ToyModel
from tests.waiting import until

PROMPT = ids("one two three")
PATHS = ["/v1/completions", "/v1/chat/completions"]


class EndingModel(ToyModel):
    """A toy model of the fakes' vocabulary whose answers end: the end-of-sequence token is likely after two others."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(VOCAB, seed)

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        values = super().logprobs(tokens)
        values[EOS] = -1.5 if len(tokens) % 4 == 3 else -9.0
        return values


class FakeBranch:
    """A branch at the fake engine: each call of `rows` computes a token, but may wait for the backend before."""

    engine = "0"

    def __init__(self, backend: "BeamBackend", tokens: "array[int]", sampling: Sampling, output: "array[int]") -> None:
        self.tokens, self.sampling, self.output = tokens, sampling, output
        self.outputs = [self.output]
        self.interruptions: list[Interruption] = []
        self.recoveries: list[Interruption] = []
        self._backend, self._is_first = backend, not output

    async def wait_accepted(self) -> None:
        await self._backend.answers.wait()
        if self._backend.refusal is not None:
            raise self._backend.refusal

    async def rows(self) -> list[ProgressRow]:
        await self.wait_accepted()
        await asyncio.sleep(0)
        backend, sampling = self._backend, self.sampling
        if len(self.output) == backend.pause_at:
            await backend.go_on.wait()
        if len(self.output) == backend.fail_at and backend.failure is not None:
            raise backend.failure
        if len(self.output) == backend.error_at:
            return [ProgressRow(1, 0, len(self.output), [], finish_reason=FinishReason.ERROR, detail="out of luck")]
        row = backend.model.distribution([*self.tokens, *self.output], sampling.logprobs)
        scores = None
        if sampling.prompt_logprobs >= 0 and not self.output:
            scores = [TokenLogprobs(-0.5, 1, [3], [-0.5]) for _ in self.tokens[1:]]
        position, token = len(self.output), row.top_ids[0]
        self.output.append(token)
        ended = FinishReason.LENGTH if len(self.output) == sampling.max_tokens else None
        admission = SchedulingInfo(0.25, 0) if self._is_first else None
        return [ProgressRow(1, 0, position, [token], [row], scores, ended, 2, "", admission)]


class BeamBackend(FakeBackend):
    """A backend for branches. Those that have been begun and not ended are `open`."""

    def __init__(self, model: ToyModel | None = None) -> None:
        super().__init__()
        self.model = model or EndingModel()
        self.branches: list[FakeBranch] = []
        self.open: list[FakeBranch] = []
        self.error_at = -1
        self.arguments: list[dict[str, Any]] = []

    def begin(self, tokens: "array[int]", sampling: Sampling, *, output: "array[int]", **others: Any) -> FakeBranch:
        assert tokens.typecode == output.typecode == "i"
        assert (others["after"] is None) == (not output), "only a first branch may be refused for load"
        branch = FakeBranch(self, tokens, sampling, output)
        self.branches.append(branch)
        self.open.append(branch)
        self.arguments.append(others)
        self.submitted.set()
        return branch

    def end(self, request: FakeBranch) -> None:
        self.open.remove(request)


def search(
    model: ToyModel, width: int, max_tokens: int, *, prompt: Sequence[int] = PROMPT, penalty: float = 1.0, **fields: Any
) -> list[FinishedBeam]:
    """Return the result of a search, run directly."""
    settings = BeamSettings(width, penalty)
    sampling = Sampling(**({"max_tokens": max_tokens, "seed": 0, "stop_token_ids": [EOS], "logprobs": 2} | fields))
    beams = BeamSearch(settings, sampling)
    while beams.running:
        count = settings.num_candidates(sampling)
        beams.advance([model.distribution([*prompt, *beam.tokens], count) for beam in beams.running])
    return beams.finished


def shown(beam: Beam) -> str:
    tokens = beam.tokens
    return TOKENIZER.decode(tokens[:-1] if tokens[-1] == EOS else tokens)


def reasons(found: Sequence[FinishedBeam]) -> list[str]:
    return [one.finish_reason.value for one in found]


async def test_a_completion_has_the_best_beams() -> None:
    backend = BeamBackend()
    found = search(backend.model, 3, 8)
    async with serve(backend) as client:
        answer = await client.complete(prompt=PROMPT, use_beam_search=True, n=3, max_tokens=8, temperature=0)
    assert [choice["text"] for choice in answer["choices"]] == [shown(one.beam) for one in found]
    assert [choice["finish_reason"] for choice in answer["choices"]] == reasons(found)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["stop_reason"] for choice in answer["choices"]] == [None] * 3
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 3
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == sum(one.beam.length for one in found)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert backend.open == []
    assert {one["request_id"] for one in backend.arguments} == {answer["id"]}


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_has_each_beam_in_one_chunk(path: str) -> None:
    backend = BeamBackend()
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 8}
    async with serve(backend) as client:
        if path == PATHS[0]:
            whole = await client.complete(prompt=PROMPT, **fields)
            chunks = await client.stream_completion(prompt=PROMPT, stream_options={"include_usage": True}, **fields)
            contents = [choice["text"] for choice in whole["choices"]]
        else:
            whole = await client.chat(**fields)
            chunks = await client.stream_chat(stream_options={"include_usage": True}, **fields)
            contents = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts(chunks) == dict(enumerate(contents))
    assert ends(chunks) == {choice["index"]: [choice["finish_reason"]] for choice in whole["choices"]}
    assert chunks[-1]["usage"] == whole["usage"]
    assert len(chunks) == (4 if path == PATHS[0] else 7), "a role, a content for each, and the usage"
    assert backend.open == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_asked_of_prompt_and_answer_holds_for_beams(stream: bool) -> None:
    """A cut prompt, its echo, token ids and the cache's salt, with chunks of several tokens."""
    backend = BeamBackend()
    found = search(backend.model, 2, 6, prompt=PROMPT[1:])
    fields = {
        "prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 6, "truncate_prompt_tokens": 2, "echo": True,
        "return_token_ids": True, "cache_salt": "mine", "stream_interval": 3,
    }  # fmt: skip
    shown_texts, prompts, outputs = ["", ""], [[], []], [[], []]
    async with serve(backend) as client:
        answers = await client.stream_completion(**fields) if stream else [await client.complete(**fields)]
    for answer in answers:
        for choice in answer["choices"]:
            shown_texts[choice["index"]] += choice["text"]
            prompts[choice["index"]] += choice.get("prompt_token_ids", [])
            outputs[choice["index"]] += choice["token_ids"]
    assert shown_texts == [TOKENIZER.decode([*PROMPT[1:], *one.beam.tokens]) for one in found]
    assert prompts == [PROMPT[1:]] * 2
    assert outputs == [one.beam.tokens for one in found]
    assert {one["cache_salt"] for one in backend.arguments} == {"mine"}


async def test_long_beams_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"prompt": PROMPT, "use_beam_search": True, "n": 3, "max_tokens": 8, "logprobs": 1, "prompt_logprobs": 0}
    async with serve(BeamBackend()) as client:
        whole = await client.complete(**fields)
        monkeypatch.setattr(beam_request, "PIECE", 3)
        pieces = await client.complete(**fields)
        chunks = await client.stream_completion(**fields | {"prompt_logprobs": None})
    assert pieces["choices"] == whole["choices"]
    assert pieces["usage"] == whole["usage"]
    assert texts(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert ends(chunks) == {choice["index"]: [choice["finish_reason"]] for choice in whole["choices"]}
    assert len(chunks) > 3


async def test_best_of_beams_n_are_returned() -> None:
    backend = BeamBackend()
    async with serve(backend) as client:
        answer = await client.complete(prompt=PROMPT, use_beam_search=True, best_of=5, n=2, max_tokens=6)
    assert [choice["text"] for choice in answer["choices"]] == [
        shown(one.beam) for one in search(backend.model, 5, 6)[:2]
    ]


@pytest.mark.parametrize("penalty", [-2.0, 0.0, 3])
async def test_the_length_penalty_reaches_the_search(penalty: float) -> None:
    backend = BeamBackend()
    found, plain = search(backend.model, 4, 9, penalty=penalty), search(backend.model, 4, 9)
    assert [one.beam.tokens for one in found] != [one.beam.tokens for one in plain]
    async with serve(backend) as client:
        answer = await client.complete(prompt=PROMPT, use_beam_search=True, n=4, max_tokens=9, length_penalty=penalty)
    assert [choice["text"] for choice in answer["choices"]] == [shown(one.beam) for one in found]


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"ignore_eos": True}, {"stop_token_ids": []}),
        ({"min_tokens": 6}, {"min_tokens": 6}),
        ({"stop_token_ids": [5, 6, 7]}, {"stop_token_ids": [5, 6, 7, EOS]}),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, {}),
    ],
)
async def test_ends_are_those_of_the_request(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    backend = BeamBackend()
    found = search(backend.model, 4, 9, **sampling)
    async with serve(backend) as client:
        answer = await client.complete(prompt=PROMPT, use_beam_search=True, n=4, max_tokens=9, logprobs=0, **fields)
    assert [choice["finish_reason"] for choice in answer["choices"]] == reasons(found)
    for choice, one in zip(answer["choices"], found, strict=True):
        assert len(choice["logprobs"]["tokens"]) == one.beam.length
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(one.beam.cum_logprob)
        last = one.beam.tokens[-1]
        assert choice["stop_reason"] == (last if last in fields.get("stop_token_ids", ()) else None)
        stop_text = TOKENIZER.decode([EOS], skip_special_tokens=False)
        visible = "include_stop_str_in_output" in fields and last == EOS
        assert choice["text"].endswith(stop_text) == visible


async def test_log_probabilities_are_those_of_the_beams() -> None:
    backend = BeamBackend()
    found = search(backend.model, 2, 5)
    async with serve(backend) as client:
        answer = await client.complete(prompt=PROMPT, use_beam_search=True, n=2, max_tokens=5, logprobs=2)
        chat = await client.chat(use_beam_search=True, n=2, max_tokens=5, logprobs=True, top_logprobs=20)
    for choice, one in zip(answer["choices"], found, strict=True):
        entries = one.beam.all_logprobs
        assert entries is not None
        assert choice["logprobs"]["token_logprobs"] == pytest.approx([entry.logprob for entry in entries])
        assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"])
    for choice in chat["choices"]:
        assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [20] * len(
            choice["logprobs"]["content"]
        )
    assert backend.branches[-1].sampling.logprobs == 20, "as many as are wanted, if that is more than the search needs"


async def test_beams_beside_tools_are_free() -> None:
    """A search has no grammar, and the calls of one are only taken out of its text."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with serve(BeamBackend(), template="{{ tools }}" + CHATML, tool_call_parser="hermes") as client:
        answer = await client.chat(use_beam_search=True, n=2, max_tokens=5, tools=[tool])
    assert len(answer["choices"]) == 2


async def test_the_prompt_is_scored_once() -> None:
    backend = BeamBackend()
    fields = {"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 5}
    async with serve(backend) as client:
        answer = await client.complete(**fields, prompt_logprobs=1)
        assert [one.sampling.prompt_logprobs for one in backend.branches][:2] == [1, -1]
        backend.branches.clear()
        echoed = await client.complete(**fields, echo=True, logprobs=1)
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(PROMPT)
    assert echoed["choices"][1]["logprobs"]["token_logprobs"][: len(PROMPT)] == [None, *[-0.5] * (len(PROMPT) - 1)]
    assert echoed["choices"][1]["text"].startswith("one two three")


async def test_the_models_defaults_of_sampling_do_not_apply() -> None:
    backend = BeamBackend()
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, repetition_penalty=1.2)
    async with serve(backend, defaults=defaults) as client:
        await client.complete(prompt=PROMPT, use_beam_search=True, n=2, max_tokens=5)
    for branch in backend.branches:
        assert (branch.sampling.temperature, branch.sampling.top_p, branch.sampling.repetition_penalty) == (0, 1, 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stop": "x"}, "stop"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}, "repetition_detection"),
        ({"response_format": {"type": "json_object"}}, "use_beam_search"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "use_beam_search"),
        ({"n": 33}, "n"),
        ({"best_of": 33}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"length_penalty": 10.5}, "length_penalty"),
        ({"length_penalty": "x"}, "length_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 32, "stop_token_ids": list(range(40))}, "stop_token_ids"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "n": 2, "best_of": 3}, "best_of"),
        ({"use_beam_search": 1}, "use_beam_search"),
    ],
)
async def test_what_a_beam_search_cannot_do_is_refused(path: str, fields: dict[str, Any], param: str) -> None:
    """Before a stream begins, too."""
    backend = BeamBackend()
    prompt: dict[str, Any] = {"prompt": PROMPT, "logprobs": 1}
    if path == PATHS[1]:
        prompt = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    body = prompt | {"use_beam_search": True, "max_tokens": 5, "n": 2, "stream": True} | fields
    async with serve(backend) as client:
        status, error = await client.refused(path, body)
    assert (status, error["param"]) == (400, param)
    assert backend.branches == []


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1.0},
        {"stop": [], "logit_bias": {}, "seed": 4, "best_of": 2, "length_penalty": None},
        {"response_format": {"type": "text"}, "user": "me"},
        {"bad_words": [], "allowed_token_ids": None, "repetition_detection": {}, "thinking_token_budget": -1},
        {"logprob_token_ids": []},
    ],
)
async def test_what_asks_for_nothing_is_taken(fields: dict[str, Any]) -> None:
    async with serve(BeamBackend()) as client:
        answer = await client.complete(prompt=PROMPT, use_beam_search=True, n=2, max_tokens=3, **fields)
    assert len(answer["choices"]) == 2


async def test_beams_of_long_contexts_are_bounded() -> None:
    backend, long = BeamBackend(), 300_000
    assert backend.welcome is not None
    backend.welcome = replace(backend.welcome, max_model_len=long)
    async with serve(backend) as client:
        fields = {"prompt": PROMPT, "use_beam_search": True, "n": 4, "max_tokens": long // 4}
        _, error = await client.refused(PATHS[0], fields)
        _, prompts = await client.refused(PATHS[0], fields | {"prompt": [PROMPT] * 40, "n": 32, "max_tokens": 3})
    assert error["param"] == "max_tokens"
    assert "at most 262144" in error["message"]
    assert prompts["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
async def test_all_beams_hold_log_probabilities_until_the_search_ends(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.stream.MAX_LOGPROBS_AT_ONCE", 2 * 4 * 8 * 3)
    fields = {"use_beam_search": True, "best_of": 4, "max_tokens": 8, "logprobs": 2, "stream": stream}
    async with serve(BeamBackend()) as client:
        async with client.post(PATHS[0], json=fields | {"prompt": [PROMPT] * 2}) as response:
            assert response.status == 200
        status, error = await client.refused(PATHS[0], fields | {"prompt": [PROMPT] * 3})
    assert (status, error["param"]) == (400, "logprobs")
    assert "288" in error["message"]


async def test_several_prompts_are_searched_at_once() -> None:
    backend = BeamBackend()
    prompts = [PROMPT, PROMPT[:2]]
    found = [one for prompt in prompts for one in search(backend.model, 2, 5, prompt=prompt)]
    async with serve(backend) as client:
        answer = await client.complete(prompt=prompts, use_beam_search=True, n=2, max_tokens=5)
    assert [choice["text"] for choice in answer["choices"]] == [shown(one.beam) for one in found]
    assert {one["samples_before"] for one in backend.arguments} == {0, 1, 2, 3}


async def test_a_full_queue_refuses_the_search_and_no_branch() -> None:
    backend = BeamBackend()
    backend.refusal = Overloaded("too many", 3.0)
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 5, "stream": True}
    async with serve(backend) as client, client.post(PATHS[0], json=body) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "3")
        await error_of(response)
    assert (len(backend.branches), backend.open) == (1, [])


@pytest.mark.parametrize("how", ["raised", "row"])
async def test_a_failure_of_one_branch_ends_all(how: str) -> None:
    backend = BeamBackend()
    if how == "raised":
        backend.fail_at, backend.failure = 2, EngineFailure("the engine is lost")
    else:
        backend.error_at = 2
    async with serve(backend) as client:
        status, error = await client.refused(
            PATHS[0], {"prompt": PROMPT, "use_beam_search": True, "n": 3, "max_tokens": 9}
        )
        value = await figures(client)
    assert status == 500
    assert error["message"] == ("the engine is lost" if how == "raised" else "out of luck")
    assert backend.open == []
    labels = {"model_name": MODEL, "engine": "0"}
    assert value("vllm:request_success_total", finished_reason="error", **labels) == 3


async def test_a_client_that_leaves_ends_all_branches() -> None:
    backend = BeamBackend()
    backend.pause_at = 3
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 4, "max_tokens": 9, "stream": True}
    async with serve(backend) as client:
        response = await client.post(PATHS[0], json=body)
        await until(lambda: any(len(branch.output) == 3 for branch in backend.open))
        assert len(backend.open) == 4
        response.close()
        await until(lambda: not backend.open)


async def test_a_search_is_one_request_of_n_samples_in_the_metrics() -> None:
    backend = BeamBackend()
    found = search(backend.model, 4, 8)
    async with serve(backend) as client:
        await client.complete(prompt=PROMPT, use_beam_search=True, n=4, max_tokens=8)
        value = await figures(client)
    labels = {"model_name": MODEL, "engine": "0"}
    assert (
        sum(value("vllm:request_success_total", finished_reason=reason, **labels) for reason in ("stop", "length")) == 4
    )
    assert value("vllm:request_params_n_sum", **labels) == 4
    assert value("vllm:request_params_max_tokens_sum", **labels) == 8
    assert value("vllm:request_generation_tokens_sum", **labels) == sum(one.beam.length for one in found)
    assert value("vllm:request_queue_time_seconds_sum", **labels) == 4 * 0.25


async def test_openais_client_sends_it_in_extra_body() -> None:
    backend = BeamBackend()

    def work(client: openai.OpenAI) -> Any:
        return client.completions.create(
            model=MODEL, prompt=PROMPT, n=3, max_tokens=6, extra_body={"use_beam_search": True, "length_penalty": 0.5}
        )

    async with serve(backend) as server:
        url = f"http://{server.host}:{server.port}/v1"

        def run() -> Any:
            with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
                return work(client)

        answer = await asyncio.to_thread(run)
    found = search(backend.model, 3, 6, penalty=0.5)
    assert [choice.text for choice in answer.choices] == [shown(one.beam) for one in found]

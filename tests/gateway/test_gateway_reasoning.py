"""Tests of reasoning in chats: apart from the answer, in messages, streams and the usage."""

from typing import Any

import pytest

from shared.protocol import ReasoningLimit
from shared.text.tokenizer import Tokenizer
from tests.gateway.fakes import TOKENIZER, FakeBackend, says, serve
from tests.gateway.test_gateway_tools import HERMES, TIME, TOOLS, calls_of, joined, scripted
from tests.text.tool_outputs import WRITERS
from tests.text.vocabulary import CHATML, make_backend

THINKING = CHATML + "{% if false %}</think>{% endif %}"
OPENS = CHATML + "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"
OUTPUT = "<think>\nWell.\n</think>\n\none two"


@pytest.mark.parametrize(
    ("template", "output"), [(THINKING, OUTPUT), (OPENS, OUTPUT.removeprefix("<think>\n")), (OPENS, OUTPUT)]
)
async def test_reasoning_is_taken_apart(template: str, output: str) -> None:
    """A prompt may end inside reasoning."""
    async with serve(FakeBackend(says(output)), template=template) as client:
        answer = await client.chat()
        chunks = await client.stream_chat(stream_options={"include_usage": True, "continuous_usage_stats": True})
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("one two", "Well.", "Well.")
    assert joined(chunks)[0] == {"content": "one two", "reasoning": "Well.", "reasoning_content": "Well."}
    tokens = len(TOKENIZER.encode("Well.\n"))
    for usage in (answer["usage"], chunks[-1]["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": tokens}
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2] == tokens


async def test_reasoning_may_be_left_out() -> None:
    """Its log-probabilities are left out too, since they have its text, but it is counted."""
    async with serve(FakeBackend(says(OUTPUT)), template=THINKING) as client:
        fields: dict[str, Any] = {"include_reasoning": False, "logprobs": True}
        answer = await client.chat(**fields)
        chunks = await client.stream_chat(**fields)
    choice = answer["choices"][0]
    assert "reasoning" not in choice["message"]
    assert "reasoning_content" not in choice["message"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(TOKENIZER.encode("Well.\n"))
    assert joined(chunks)[0] == {"content": "one two"}
    streamed = [
        entry["token"]
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "W" not in streamed
    assert streamed == [*"<think>\n\n\n", "one", " two", "</s>"], "what is around the reasoning is shown"


async def test_an_answer_that_never_comes_is_null() -> None:
    async with serve(FakeBackend(says(OUTPUT)), template=THINKING) as client:
        choice = (await client.chat(max_tokens=10))["choices"][0]
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "We")
        assert choice["finish_reason"] == "length"
        message = (await client.chat(max_tokens=10, include_reasoning=False))["choices"][0]["message"]
        assert (message["content"], "reasoning" in message) == ("", False)


async def test_an_answer_without_reasoning() -> None:
    async with serve(FakeBackend(says("one two")), template=THINKING) as client:
        answer = await client.chat()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("one two", None, None)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_the_effort_reaches_the_template() -> None:
    template = "{{ messages[0].content }} {{ reasoning_effort }} {{ enable_thinking }}"
    backend = FakeBackend()
    async with serve(backend, template=template) as client:
        await client.chat(reasoning_effort="high")
        await client.chat(reasoning_effort="none")
        await client.chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
        await client.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "medium"})
        status, error = await client.refused(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "huge"}
        )
        assert (status, error["param"]) == (400, "reasoning_effort")
    prompts = [TOKENIZER.decode(request.tokens) for request in backend.requests]
    assert prompts == ["hi high ", "hi none False", "hi none True", "hi medium "]


async def test_thinking_may_be_turned_off() -> None:
    async with serve(FakeBackend(says("one two")), template=OPENS) as client:
        message = (await client.chat(chat_template_kwargs={"enable_thinking": False}))["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("one two", None)
        message = (await client.chat())["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == (None, "one two")


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"), [("<think>So ", "one", "two"), ("So ", None, "one</think>two")]
)
async def test_a_continued_message_may_be_inside_reasoning(begun: str, reasoning: str | None, content: str) -> None:
    messages = [{"role": "user", "content": "hi <think>"}, {"role": "assistant", "content": begun}]
    async with serve(FakeBackend(says("one</think>two")), template=THINKING) as client:
        answer = await client.chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (reasoning, content)


async def test_none_leaves_reasoning_in_the_content() -> None:
    async with serve(FakeBackend(says(OUTPUT)), template=THINKING, reasoning_parser="none") as client:
        answer = await client.chat()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": OUTPUT, "refusal": None}
    assert "completion_tokens_details" not in answer["usage"]


async def test_reasoning_then_a_call() -> None:
    output = "<think>\nWell.\n</think>\n\n" + WRITERS["hermes"]([TIME])
    async with serve(scripted(output), template=HERMES, reasoning_parser="qwen3") as client:
        choice = (await client.chat(tools=TOOLS))["choices"][0]
        streamed = joined(await client.stream_chat(tools=TOOLS))[0]
    for message in (choice["message"], streamed):
        assert (message["content"] or "", message["reasoning"], calls_of(message)) == ("", "Well.", [TIME])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None


def thinking_tokenizer() -> Tokenizer:
    """Return a tokenizer in which the marks of reasoning are tokens, as in most models."""
    backend = make_backend()
    backend.add_tokens(["<think>", "</think>"])
    return Tokenizer(backend, special=TOKENIZER.special, eos_token_ids=TOKENIZER.eos_token_ids)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_budget_reaches_the_engine(path: str) -> None:
    backend, tokenizer = FakeBackend(), thinking_tokenizer()
    prompt: Any = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    async with serve(backend, template=THINKING, tokenizer=tokenizer) as client:
        for budget in (5, 0, -1, None):
            body = {name: prompt[name], "thinking_token_budget": budget}
            async with client.post(path, json=body) as response:
                assert response.status == 200, await response.text()
    begin, end = TOKENIZER.vocab_size, TOKENIZER.vocab_size + 1
    assert tokenizer.decode([begin, end]) == "<think></think>"
    limits = [request.sampling.reasoning_limit for request in backend.requests]
    assert limits == [ReasoningLimit(5, [begin], [end]), ReasoningLimit(0, [begin], [end]), None, None]


async def test_a_budget_counts_from_the_output_on_if_the_prompt_has_begun_to_think() -> None:
    backend = FakeBackend()
    async with serve(backend, template=OPENS, tokenizer=thinking_tokenizer()) as client:
        await client.chat(thinking_token_budget=5)
        await client.chat(thinking_token_budget=5, chat_template_kwargs={"enable_thinking": False})
        for prompt in ("<think>one two", "</think><think>", "<think>one</think> two", "one"):
            await client.complete(prompt=prompt, thinking_token_budget=5)
    limits = [request.sampling.reasoning_limit for request in backend.requests]
    assert [limit is not None and limit.is_open for limit in limits] == [True, False, True, True, False, False]


async def test_a_budget_needs_a_model_whose_reasoning_has_known_tokens() -> None:
    """It would be ignored otherwise."""
    fields = {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 5}
    with_tokens = {"tokenizer": thinking_tokenizer()}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"template": CHATML} | with_tokens, "no parser of reasoning"),
        ({"template": THINKING, "reasoning_parser": "none"} | with_tokens, "no parser of reasoning"),
        ({"template": THINKING}, "parser qwen3"),
        ({"template": THINKING, "reasoning_parser": "granite"} | with_tokens, "parser granite"),
        ({"template": THINKING, "reasoning_parser": "openai_gptoss"} | with_tokens, "parser openai_gptoss"),
    ]
    for settings, words in cases:
        async with serve(**settings) as client:
            status, error = await client.refused("/v1/chat/completions", fields)
            await client.chat(thinking_token_budget=-1)
        assert (status, error["param"]) == (400, "thinking_token_budget")
        assert words in error["message"]


async def test_a_marker_that_may_end_reasoning_too_is_one_of_its_ends() -> None:
    backend, tokenizer = FakeBackend(), thinking_tokenizer()
    tokenizer.backend.add_tokens(["<|tool_calls_section_begin|>"])
    async with serve(backend, template=THINKING, tokenizer=tokenizer, reasoning_parser="kimi_k2") as client:
        await client.chat(thinking_token_budget=5)
    limit = backend.requests[0].sampling.reasoning_limit
    assert limit is not None
    assert [tokenizer.decode([end]) for end in limit.ends] == ["</think>", "<|tool_calls_section_begin|>"]


async def test_completions_are_not_taken_apart() -> None:
    async with serve(FakeBackend(says(OUTPUT)), template=THINKING) as client:
        assert (await client.complete(prompt="x", max_tokens=99))["choices"][0]["text"] == OUTPUT

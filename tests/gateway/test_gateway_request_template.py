"""Tests of chat templates that requests bring: they render, and what they take is bounded."""

import asyncio
import signal
import subprocess
import sys

import msgspec
import pytest

from services.gateway import request_template
from services.gateway.request_template import render_request_template
from shared.text.template import ChatTemplate
from tests.gateway.fakes import TOKENIZER, FakeBackend, serve
from tests.text.vocabulary import CHATML

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
ENDLESS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


async def test_a_template_of_a_request_is_refused_unless_trusted() -> None:
    backend = FakeBackend()
    async with serve(backend) as client:
        for stream in (False, True):
            status, error = await client.refused(PATH, {"messages": [USER], "chat_template": CHATML, "stream": stream})
            assert (status, error["param"]) == (400, "chat_template")
            assert "--trust-request-chat-template" in error["message"]
        await client.chat(chat_template=None)
        status, error = await client.refused(PATH, {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}})
        assert (status, error["param"]) == (400, "chat_template_kwargs")
    assert len(backend.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_of_a_request_renders_its_messages(stream: bool) -> None:
    """It has what the server's own has: special tokens, variables, content as it reads it, and continued messages."""
    template = (
        "{{ eos_token }}{{ mood }}{% for message in messages %}[{{ message.content }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    backend = FakeBackend()
    async with serve(backend, trust_request_chat_template=True) as client:
        ask = client.stream_chat if stream else client.chat
        parts = [{"type": "text", "text": text} for text in ("a", "b")]
        await ask(
            messages=[{"role": "user", "content": parts}],
            chat_template=template,
            chat_template_kwargs={"mood": "good"},
        )
        continued = [USER, {"role": "assistant", "content": "so "}]
        fields = {"add_generation_prompt": False, "continue_final_message": True}
        await ask(messages=continued, chat_template=template, **fields)
        await ask()
    shown = [TOKENIZER.decode(request.tokens, skip_special_tokens=False) for request in backend.requests]
    assert shown[0] == "</s>good[a\nb]>"
    assert shown[1] == "</s>[hi][so "
    assert shown[2].startswith("<|im_start|>user"), "the next request has the server's own again"


async def test_it_gets_what_the_servers_own_template_gets() -> None:
    own = ChatTemplate("", {"eos_token": "</s>"}, content_format="openai", variables={"mood": "good", "name": "ann"})
    text = await render_request_template(
        "{{ eos_token }}{{ mood }}{{ name }}{{ messages[0].content[0].text }}",
        own,
        [USER],
        max_characters=100,
        variables={"name": "bob"},
    )
    assert text == "</s>goodbobhi"


@pytest.mark.parametrize(
    ("template", "words", "param"),
    [
        ("{% if %}", "line 1", "chat_template"),
        ("{{ raise_exception('not you') }}", "not you", "messages"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe", "messages"),
        ("{{ 1 / 0 }}", "division", "messages"),
        ("{{ 'x' * 100000 }}", "characters", "chat_template"),
        ("{{ 'x' * 10000000000 }}", "1024 MiB", "chat_template"),
        (ENDLESS, "than 3 s", "chat_template"),
        ("{{ 9 ** 999999999 }}", "than 3 s", "chat_template"),
        ("{{ '\\ud800' }}", "surrogate", "chat_template"),
        ("x" * (128 * 1024 + 1), "131072 characters, got 131073", "chat_template"),
    ],
)
async def test_what_a_template_may_take_is_bounded(template: str, words: str, param: str) -> None:
    """Other requests are served meanwhile, and the next template after it."""
    async with serve(trust_request_chat_template=True) as client:
        asked = asyncio.ensure_future(client.refused(PATH, {"messages": [USER], "chat_template": template}))
        while not asked.done():
            await client.chat(max_tokens=2)
            await asyncio.sleep(0.01)
        status, error = await asked
        assert status == 400
        assert words in error["message"]
        assert error["param"] == param
        assert (await client.chat(chat_template=CHATML))["choices"][0]["message"]["content"] == "one two three"


def test_a_long_error_of_a_template_stays_in_its_process() -> None:
    job = request_template._Job("{{ raise_exception('x' * 100000) }}", {}, [USER], {}, 100)
    result = request_template._run(job)
    assert result.error.startswith("xxx")
    assert len(result.error) == request_template.MAX_ERROR


async def test_a_process_that_gets_no_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_template, "TIMEOUT", 0.01)  # starting it takes longer
    async with serve(trust_request_chat_template=True) as client:
        status, error = await client.refused(PATH, {"messages": [USER], "chat_template": CHATML})
        assert (status, error["param"]) == (400, "chat_template")
        assert "within 0.01 s" in error["message"]


async def test_few_requests_wait_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_template, "MAX_WAITING", 1 - request_template.MAX_PROCESSES)
    body = {"messages": [USER], "chat_template": CHATML}
    async with serve(trust_request_chat_template=True) as client:
        for _ in range(2):
            answers = await asyncio.gather(*(client.post(PATH, json=body) for _ in range(3)))
            assert sorted(answer.status for answer in answers) == [200, 429, 429]
            assert {answer.headers.get("Retry-After") for answer in answers if answer.status == 429} == {"5"}


def test_a_process_ends_by_itself_if_its_gateway_was_killed() -> None:
    """It has a limit of its own, since nobody is there to end it."""
    job = request_template._Job(ENDLESS, {}, [USER], {}, 100)
    program = "import services.gateway.request_template as module; module.CPU_SECONDS = 1; module._main()"
    done = subprocess.run([sys.executable, "-c", program], input=msgspec.json.encode(job), capture_output=True)
    assert done.returncode == -signal.SIGXCPU, "by the kernel"
    assert done.stdout == b""


async def test_tools_may_be_shown_by_the_template_of_the_request() -> None:
    """The server's own, which shows none, is not asked then."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    shows = CHATML + "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}"
    async with serve(trust_request_chat_template=True, tool_call_parser="auto") as client:
        status, error = await client.refused(PATH, {"messages": [USER], "tools": tools})
        assert (status, "does not show tools" in error["message"]) == (400, True)
        status, error = await client.refused(PATH, {"messages": [USER], "tools": tools, "chat_template": shows})
        assert "does not show tools" not in error["message"]

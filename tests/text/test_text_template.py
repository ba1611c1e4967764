"""Tests chat templates: the files they come from, the messages they get, and their errors."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InvalidRequest, ModelError
from shared.text.template import ChatTemplate
from tests.text.vocabulary import CHATML, write_model_folder

USER = {"role": "user", "content": "hi"}
STRICT = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "[{{ message.content }}]{% endfor %}"
)

ARGUMENTS = "{% for call in messages[-1].tool_calls %}{{ call.function.arguments | tojson }};{% endfor %}"


def render(*messages: Any, template: str = CHATML, **options: Any) -> str:
    return ChatTemplate(template).render(messages, **options)


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_no_content_is_empty_content(message: dict[str, Any]) -> None:
    """TPL-01, TPL-02."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [USER, {"role": "assistant", "tool_calls": [call], **message}, {"role": "tool", "content": ""}, USER]
    expected = render(USER, {"role": "assistant", "content": ""}, {"role": "tool", "content": ""}, USER)
    assert render(*history) == expected
    assert "None" not in expected


def test_arguments_of_tool_calls_are_objects_for_the_template() -> None:
    """TPL-01."""
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ('{"a": "é"}', {"b": 1})]
    assert render({"role": "assistant", "tool_calls": calls}, template=ARGUMENTS) == '{"a": "é"};{"b": 1};'


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_the_thinking_of_a_call_is_there_for_the_template_of_gpt_oss(name: str) -> None:
    """Which refuses it beside a content, and calls nothing else by this name."""
    template = "{% for m in messages %}{{ m.thinking }},{{ m.reasoning }},{{ m.content }};{% endfor %}"
    call: dict[str, Any] = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], name: "hm"}
    messages = [call, call | {"content": ""}, call | {"content": "I look."}, {"role": "assistant", name: "hm"}]
    assert render(*messages, template=template) == "hm,hm,;hm,hm,;,hm,I look.;,hm,;"
    assert render(call | {"thinking": "own"}, template=template) == "own,hm,;"


@pytest.mark.parametrize("arguments", [None, "null", "", " \n", " null ", "{}", {}, ...])
@pytest.mark.parametrize("field", ["tool_calls", "function_call"])
def test_arguments_that_are_not_there_are_an_empty_object(field: str, arguments: Any) -> None:
    """TXT-07."""
    function = {"name": "f", "arguments": arguments} if arguments is not ... else {"name": "f"}
    value = [{"id": None, "function": function}] if field == "tool_calls" else function
    template = ARGUMENTS if field == "tool_calls" else "{{ messages[0].function_call.arguments | tojson }};"
    assert render({"role": "assistant", field: value}, template=template) == "{};"


@pytest.mark.parametrize(
    "arguments",
    ["{", "[1]", "1", "true", '"x"', '"{}"', '{"a": 1} x', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "nul",
     "[" * 100_000, '{"a":' * 100_000, [1], 5, True, 1.5],
)  # fmt: skip
def test_arguments_that_are_no_object_are_refused_by_their_path(arguments: Any) -> None:
    """TXT-07."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequest) as caught:
        render(USER, {"role": "assistant", "content": None, "tool_calls": [call]}, template=ARGUMENTS)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
    assert caught.value.param in caught.value.message
    assert len(caught.value.message) < 300
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.function_call\.arguments"):
        render({"role": "assistant", "function_call": {"name": "f", "arguments": arguments}}, template=ARGUMENTS)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"id": "1"}, "function"),
        ({"function": None}, "function"),
        ({"function": "f"}, "function"),
        ({"function": {"arguments": "{}"}}, "function.name"),
        ({"function": {"name": None, "arguments": "{}"}}, "function.name"),
        ({"name": "f", "arguments": "["}, "arguments"),
    ],
)
def test_a_call_that_is_none_is_refused_by_its_path(call: dict[str, Any], param: str) -> None:
    """TXT-07."""
    fine = {"name": "f", "arguments": None}  # some clients leave the wrapping out, and some templates take that
    with pytest.raises(InvalidRequest) as caught:
        render({"role": "assistant", "tool_calls": [fine, call]})
    assert caught.value.param == f"messages[0].tool_calls[1].{param}"


def test_fields_that_are_null_are_not_there_for_the_template() -> None:
    """TXT-07: a client's library writes all fields of a message, and templates ask whether they are there."""
    template = "{% for m in messages %}{{ m | list | sort | join(',') }};{% endfor %}"
    null = {"refusal": None, "tool_calls": None, "function_call": None, "name": None}
    message = {"role": "assistant", "content": None}
    assert render(message | null, message | {"tool_calls": []}, template=template) == "content,role;content,role;"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_by_newlines(role: str) -> None:
    """TPL-03."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render({"role": role, "content": parts}, USER) == render({"role": role, "content": "a\nb"}, USER)


@pytest.mark.parametrize("part_type", ["image_url", "video", "whatever"])
def test_other_parts_are_refused_by_their_type(part_type: str) -> None:
    """TPL-03."""
    with pytest.raises(InvalidRequest, match=part_type) as caught:
        render(USER, {"role": "user", "content": [{"type": part_type, "image_url": {"url": "x"}}]})
    assert caught.value.param == "messages[1].content[0]"


def test_the_type_of_a_part_is_cut_to_a_line() -> None:
    """An error is a line long, whatever a client sends."""
    with pytest.raises(InvalidRequest, match="messages") as caught:
        render({"role": "user", "content": [{"type": "x" * 1_000_000}]})
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "messages",
    [[], ["hi"], [{"content": "x"}], [{"role": 1}], [{"role": "user", "content": 5}],
     [{"role": "user", "content": ["x"]}],
     [{"role": "user", "content": [{"type": "text"}]}], [{"role": "assistant", "tool_calls": "x"}]],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequest):
        render(*messages)


@pytest.mark.parametrize("content", ["ends in space ", "ends in line\n", "ends in tab\t", "hi", "", None])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_continued_message_ends_the_prompt(content: str | None, trim: str) -> None:
    """TPL-05."""
    template = CHATML.replace("message.content", "message.content" + trim)
    prompt = ChatTemplate(template).render(
        [USER, {"role": "assistant", "content": content}], add_generation_prompt=False, continue_final_message=True
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + (content or "")


def test_both_ways_to_end_a_prompt_are_refused() -> None:
    """TPL-05."""
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        render(USER, continue_final_message=True)


def test_a_template_that_drops_the_message_is_named() -> None:
    """TPL-05."""
    with pytest.raises(InvalidRequest, match="leaves out"):
        render(USER, template="nothing", add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "x"}, USER], "System role not supported"),
        ([USER, USER], "Roles must alternate"),
        ([{"role": "assistant", "content": "x"}], "Roles must alternate"),
        ([{"role": "tool", "content": "x"}], "Roles must alternate"),
        ([{"role": "wizard", "content": "x"}], "Roles must alternate"),
        ([], "must not be empty"),
    ],
)
def test_a_templates_own_message_reaches_the_caller(messages: list[Any], words: str) -> None:
    """TPL-06."""
    with pytest.raises(InvalidRequest, match=words):
        render(*messages, template=STRICT)


@pytest.mark.parametrize(
    "body", ["{{ messages[0].a.b }}", "{{ 1 / 0 }}", "{{ messages[9]['role'].x }}", "{{ 1 + 'a' }}"]
)
def test_a_template_that_fails_is_an_invalid_request(body: str) -> None:
    """TPL-06."""
    with pytest.raises(InvalidRequest):
        render(USER, template=body)


def test_the_sandbox_holds() -> None:
    with pytest.raises(InvalidRequest):
        render(USER, template="{{ ''.__class__.__mro__[1].__subclasses__()[0] }}{{ messages.append(1) }}")


def test_templates_have_what_they_expect() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% break %}{% endfor %}{% generation %}{{ strftime_now('%Y')[:2] }}"
    )
    template += "{% endgeneration %}{{ {'a': 'é'} | tojson }}{{ tools is none }}{{ extra }}"
    special = {"bos_token": "<s>"}
    assert ChatTemplate(template, special).render([USER], variables={"extra": "!"}) == '<s>20{"a": "é"}True!'


@pytest.mark.parametrize(
    "name",
    ["messages", "add_generation_prompt", "continue_final_message", "self", "bos_token", "raise_exception",
     "strftime_now", "range", "namespace"],
)  # fmt: skip
def test_reserved_names_are_refused_as_variables(name: str) -> None:
    template = ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"})
    with pytest.raises(InvalidRequest, match=name) as caught:
        template.render([USER], variables={"mine": 1, name: 1})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["variables", "context", "args", "tools", "documents", "loop", "eos_token"])
def test_any_other_name_is_free_for_a_variable(name: str) -> None:
    template = ChatTemplate("{{ bos_token }}{{ " + name + " }}", {"bos_token": "<s>"})
    assert template.render([USER], variables={name: "mine", "": 1, "a b": 2}) == "<s>mine"


@pytest.mark.parametrize(
    "template", [CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}],
                 [{"name": "only", "template": CHATML}]]
)  # fmt: skip
def test_templates_are_found_in_tokenizer_config(tmp_path: Path, template: Any) -> None:
    folder = write_model_folder(tmp_path, template=template)
    assert ChatTemplate.load(folder, {}).render([USER]) == render(USER)


def test_a_template_file_wins_and_a_users_file_wins_over_all(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert ChatTemplate.load(folder, {}).render([USER]) == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert ChatTemplate.load(folder, {}).render([USER]) == "jinja"
    (tmp_path / "mine").write_text("mine")
    assert ChatTemplate.load(folder, {}, tmp_path / "mine").render([USER]) == "mine"
    assert ChatTemplate.load(folder, {}, str(tmp_path / "mine")).render([USER]) == "mine"
    assert ChatTemplate.load(folder, {}, "{{ 'its' }} own").render([USER]) == "its own"


def test_no_template_says_so_and_broken_ones_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate.load(write_model_folder(tmp_path, template=None), {}).render([USER])
    with pytest.raises(ModelError, match="line 1"):
        ChatTemplate("{% if %}")
    with pytest.raises(ModelError, match="nested too deeply"):
        ChatTemplate("{{ " + "(" * 5000)
    with pytest.raises(ModelError, match=rf"^{tmp_path}: the chat template is wrong in line 2"):
        ChatTemplate.load(write_model_folder(tmp_path, template="\n{% if %}"), {})
    (tmp_path / "mine").write_text("{{")
    with pytest.raises(ModelError, match=rf"^{tmp_path}/mine: the chat template is wrong in line 1"):
        ChatTemplate.load(tmp_path, {}, tmp_path / "mine")
    with pytest.raises(ModelError, match=r"^the chat template is wrong in line 1"):
        ChatTemplate.load(tmp_path, {}, "{{")
    with pytest.raises(ModelError, match="nowhere"):
        ChatTemplate.load(tmp_path, {}, tmp_path / "nowhere")
    with pytest.raises(ModelError, match="default"):
        ChatTemplate.load(write_model_folder(tmp_path, template=[{"name": "a", "template": "x"}] * 0), {})


def test_a_template_that_does_not_end_fails_the_sanity_check() -> None:
    for source in ("{{ messages[0]['content'] }}", "{{ raise_exception('no system message') }}", None):
        ChatTemplate(source).sanity_check()
    end = threading.Event()  # so that no thread goes on behind the test
    for content_format in ("string", "openai", "auto"):
        template = ChatTemplate("{{ wait() }}", content_format=content_format, variables={"wait": end.wait})
        with pytest.raises(ModelError, match=r"has not rendered one short message in 0\.2 s"):
            template.sanity_check(seconds=0.2)
    end.set()

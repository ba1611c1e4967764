"""Tests that the content format of a chat template is detected, and that every message reaches it in that format."""

from typing import Any

import pytest

from shared.errors import InvalidRequest, ModelError
from shared.text.content_format import ContentFormat
from shared.text.template import ChatTemplate


def loop(body: str) -> str:
    return "{% for m in messages %}<{{ m['role'] }}>" + body + "{% endfor %}"


EACH = "{% for part in m['content'] %}{{ part['text'] }}|{% endfor %}"
PARTS = {
    "item": EACH,
    "attribute": "{% for part in m.content %}{{ part.text }}|{% endfor %}",
    "type": "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text | trim }}|{% endif %}{% endfor %}",
    "selectattr": "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}|{% endfor %}",
    "map": "{{ m.content | map(attribute='text') | join('|') }}|",
    "raises for a string": "{% if m.content is string %}{{ raise_exception('a list, please') }}{% endif %}" + EACH,
    "upper": "{% for part in m.content %}{{ part.text | upper }}|{% endfor %}",
}
ONE_PART = {
    "first": "{{ m['content'][0]['text'] }}|",
    "first attribute": "{{ (m.content | first).text }}|",
    "last": "{{ m.content[-1].text }}|",
}
STRING = {
    "plain": "{{ m.content }}|",
    "trim": "{{ m['content'] | trim | upper }}|",
    "plus": "{{ '' + m.content + '|' }}",
    "json": "{{ m.content | tojson }}|",
    "both": "{% if m.content is string %}{{ m.content }}|{% else %}" + EACH + "{% endif %}",
    "raises for a list": "{% if m.content is not string %}{{ raise_exception('no list') }}{% endif %}{{ m.content }}|",
    "letters": "{% for letter in m.content %}{{ letter }}{% endfor %}|",
}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def conversation(written_as: str) -> list[dict[str, Any]]:
    """Return the same words as a client writes them: as strings, as parts, or as both in turn."""
    texts = {"system": "BE BRIEF", "user": "HELLO", "assistant": "YES?", "tool": "42"}
    messages: list[dict[str, Any]] = []
    for at, (role, text) in enumerate(texts.items()):
        as_parts = written_as == "parts" or (written_as == "mixed" and at % 2 == 1)
        messages.append({"role": role, "content": parts(text) if as_parts else text})
    return messages


@pytest.mark.parametrize("written_as", ["string", "parts", "mixed"])
@pytest.mark.parametrize("body", [*PARTS.values(), *ONE_PART.values(), *STRING.values()])
def test_any_way_to_write_content_reaches_any_template(body: str, written_as: str) -> None:
    """TXT-06."""
    template = ChatTemplate(loop(body))
    template.sanity_check()
    prompt = template.render(conversation(written_as)).replace('"', "")
    assert prompt == "<system>BE BRIEF|<user>HELLO|<assistant>YES?|<tool>42|"


@pytest.mark.parametrize("body", [*PARTS.values(), *ONE_PART.values(), *STRING.values()])
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_no_content_is_no_text_in_any_format(body: str, content: dict[str, Any]) -> None:
    """TXT-06: an empty list would make a template fail that looks at the first part."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "1", **content},
    ]
    prompt = ChatTemplate(loop(body)).render(messages)
    assert prompt.replace('"', "") == "<assistant>|<tool>|"


@pytest.mark.parametrize(
    ("body", "expected"),
    [(PARTS["item"], "a|b|"), (ONE_PART["first"], "a\nb|"), (STRING["plain"], "a\nb|"), (STRING["both"], "a\nb|")],
)
def test_no_part_of_several_is_lost(body: str, expected: str) -> None:
    """TXT-06: parts are given as they are to a template that shows each of them, and in one otherwise."""
    assert ChatTemplate(loop(body)).render([{"role": "user", "content": parts("a", "b")}]) == "<user>" + expected


FIRST_LANGUAGE = "{{ m.content[0].lang }}:{{ m.content[0].text }}|"
LANGUAGE = "{% for part in m.content %}{{ part.lang }}:{{ part.text }}|{% endfor %}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [(LANGUAGE, "en:a|es:b|"), (FIRST_LANGUAGE, ":a\nb|"), (STRING["both"], "a\nb|")],
)
def test_fields_beside_a_parts_text_reach_a_template_that_reads_parts(body: str, expected: str) -> None:
    """Translators' templates read languages from these fields. Parts that are joined lose them."""
    content = [part | {"lang": lang, "none": None} for part, lang in zip(parts("a", "b"), ("en", "es"), strict=True)]
    template = ChatTemplate(loop(body))
    assert template.render([{"role": "user", "content": content}]) == "<user>" + expected
    alone = template.render([{"role": "user", "content": content[:1]}])
    assert alone == "<user>" + ("en:a|" if "lang" in body else "a|")
    assert content[0] == {"type": "text", "text": "a", "lang": "en", "none": None}


def test_roles_may_differ() -> None:
    """TXT-06."""
    body = "{% if m.role == 'system' %}{{ '' + m.content + '|' }}{% elif m.role == 'assistant' %}"
    body += ONE_PART["first"] + "{% else %}" + PARTS["item"] + "{% endif %}"
    template = ChatTemplate(loop(body))
    for written_as in ("string", "parts", "mixed"):
        assert template.render(conversation(written_as)) == "<system>BE BRIEF|<user>HELLO|<assistant>YES?|<tool>42|"
    assert [template._formats.for_role(role) for role in ("system", "developer", "user", "assistant", "wizard")] == [
        ContentFormat.STRING, ContentFormat.STRING, ContentFormat.PARTS, ContentFormat.ONE_PART, ContentFormat.PARTS,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "strict",
    [
        "{% if messages[0].role != 'system' %}{{ raise_exception('begin with a system message') }}{% endif %}",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}",
        "{% if messages | length < 3 %}{{ raise_exception('a longer one') }}{% endif %}",
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}",
    ],
)
@pytest.mark.parametrize("body", [PARTS["item"], STRING["raises for a list"]])
def test_a_template_that_refuses_some_conversations_is_read_in_others(strict: str, body: str) -> None:
    """TXT-06."""
    template = ChatTemplate(strict + loop(body))
    template.sanity_check()
    roles = ("system", "user", "assistant") if "begin with" in strict else ("user", "assistant", "user")
    expected = "".join(f"<{role}>x|" for role in roles)
    for content in ("x", parts("x")):
        assert template.render([{"role": role, "content": content} for role in roles]) == expected


@pytest.mark.parametrize("body", [PARTS["item"], ONE_PART["first"], STRING["plain"]])
@pytest.mark.parametrize("content", ["so far ", parts("so ", "far "), None])
def test_a_message_is_continued_in_any_format(body: str, content: Any) -> None:
    """TXT-06."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    prompt = ChatTemplate(loop(body)).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.startswith("<user>hi|<assistant>")
    assert prompt.endswith("far " if content else "<assistant>")


@pytest.mark.parametrize(
    "source",
    [
        "nothing",
        loop(""),
        loop("{% for part in m.content %}{{ part.words }}{% endfor %}"),
        loop("{% if m.content is not string %}{{ m.content }}{% endif %}"),  # the list as Python writes it
        loop("{{ m.content[0] }}"),
        loop("{% if m.content is not string %}{{ m.content | tojson }}{% endif %}"),
    ],
)
def test_a_template_that_shows_no_content_is_refused_at_start(source: str) -> None:
    """TXT-06."""
    with pytest.raises(ModelError, match="shows nothing of a user's message") as caught:
        ChatTemplate(source).sanity_check()
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_every_probe_is_left_to_its_users() -> None:
    """TXT-06: it may ask for a variable."""
    template = ChatTemplate("{% if not mode %}{{ raise_exception('no mode') }}{% endif %}" + loop("{{ m.content }}"))
    template.sanity_check()
    with pytest.raises(InvalidRequest, match="no mode"):
        template.render([{"role": "user", "content": "x"}])
    assert template.render([{"role": "user", "content": parts("x", "y")}], variables={"mode": 1}) == "<user>x\ny"

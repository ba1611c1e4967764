"""Detects the format of `content` that a chat template reads, by rendering probes in each format.

Most templates print a string. Some loop over a list of parts and print the text of each; from a string they print
nothing, and the user's text is lost without an error. Others read only the first part. The source of a template does
not show reliably which it is. So each role is probed with two texts when a model is loaded, and its messages get the
first format in which both are printed. A string is tried first, so every template that accepts a string gets one.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

from msgspec import Struct

from shared.errors import InvalidRequest

Message: TypeAlias = dict[str, Any]
Content: TypeAlias = str | list[dict[str, Any]]
Render: TypeAlias = Callable[[list[Message]], str]

PROBE_TEXTS = ("7041776295", "3920518467")  # digits, since templates change letters' case
DECOY = "8156340972"
"""A further value in each part of a probe. If it is printed, the template prints the list as a whole."""

ARGUMENTS = {"argument": "6093157482"}
TOOL_CALL: Message = {"id": "callid001", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
JSON_TOOL_CALL: Message = TOOL_CALL | {"function": {"name": "f", "arguments": json.dumps(ARGUMENTS)}}

PROBE_CONVERSATIONS = {  # the user's first, since conversations of the other roles have a user message
    "user": ("user", "system user", "user assistant user"),
    "system": ("system user", "system user assistant user"),
    "assistant": ("user assistant user", "system user assistant user", "user assistant"),
    "tool": ("user assistant tool", "system user assistant tool"),
}
"""The conversations in which each role is probed, as their roles in order. A template may refuse some of them."""

ROLE_ALIASES = {"developer": "system", "function": "tool"}


def text_part(text: str) -> Message:
    """Return a text part of a message's content."""
    return {"type": "text", "text": text}


class ContentFormat(Enum):
    """A format of the content of one message."""

    STRING = "string"
    PARTS = "parts"
    ONE_PART = "one part"  # a list, of which the template reads only the first item

    def write(self, parts: Sequence[Message]) -> Content:
        """Return these text parts as content. A string, or a single part, has their texts joined by newlines.

        Parts that are not joined keep their other fields, which some templates read.
        """
        text = "\n".join(part["text"] for part in parts)
        if self is ContentFormat.STRING:
            return text
        if len(parts) == 1 or (parts and self is ContentFormat.PARTS):
            return list(parts)
        return [text_part(text)]  # never an empty list, since templates read the first item


PROBE_PARTS = [text_part(text) for text in PROBE_TEXTS]


class ContentFormats(Struct, frozen=True):
    """The format for each role.

    `shows_nothing`: the template prints a user's message in no format. `json_arguments`: it takes the arguments of
    tool calls as JSON, not as objects.
    """

    by_role: Mapping[str, ContentFormat] = {}
    shows_nothing: bool = False
    json_arguments: bool = False

    def for_role(self, role: str) -> ContentFormat:
        """Return the format for messages of `role`: the user's if no probe of `role` was printed."""
        format = self.by_role.get(ROLE_ALIASES.get(role, role))
        return format or self.by_role.get("user", ContentFormat.STRING)


def detect_content_formats(render: Render) -> ContentFormats:
    """Probe a template. `render` raises `InvalidRequest` for conversations that the template refuses."""
    formats: dict[str, ContentFormat] = {}
    call = TOOL_CALL
    for role in PROBE_CONVERSATIONS:
        if role == "tool" and _needs_json_arguments(render, formats):
            call = JSON_TOOL_CALL
        format, rendered = _probe(render, role, formats, call)
        if format is not None:
            formats[role] = format
        elif role == "user":
            return ContentFormats(shows_nothing=rendered)
    return ContentFormats(formats, json_arguments=call is JSON_TOOL_CALL)


def _needs_json_arguments(render: Render, formats: Mapping[str, ContentFormat]) -> bool:
    """Return whether the template prints the arguments of a call right only if they are JSON.

    Most templates take an object and turn it into JSON. Some join the arguments to other text, which fails with an
    object, or prints it as Python does.
    """

    def output_of(call: Message) -> str | None:
        try:
            return render(_conversation(["user", "assistant", "tool"], "", ContentFormat.STRING, formats, call))
        except InvalidRequest:
            return None

    output = output_of(TOOL_CALL)
    if output is not None and str(ARGUMENTS) not in output:
        return False
    return json.dumps(ARGUMENTS) in (output_of(JSON_TOOL_CALL) or "")


def _probe(
    render: Render, role: str, formats: Mapping[str, ContentFormat], call: Message
) -> tuple[ContentFormat | None, bool]:
    """Return the first format in which a role's texts are printed, and whether any conversation was rendered."""
    rendered = False
    for conversation, format in itertools.product(PROBE_CONVERSATIONS[role], ContentFormat):
        try:
            output = render(_conversation(conversation.split(), role, format, formats, call))
        except InvalidRequest:
            continue
        if DECOY not in output and all(text in output for text in PROBE_TEXTS):
            return format, True
        rendered = True
    return None, rendered


def _conversation(
    roles: list[str], probed: str, format: ContentFormat, formats: Mapping[str, ContentFormat], call: Message
) -> list[Message]:
    """Return messages of these roles. Those of `probed` have the texts of the probe, the others a short text.

    An assistant that a tool follows has made `call`.
    """
    messages: list[Message] = []
    for index, role in enumerate(roles):
        content = format.write(PROBE_PARTS) if role == probed else formats.get(role, format).write([text_part("1")])
        if isinstance(content, list):
            content = [part | {"decoy": DECOY} for part in content]
        messages.append({"role": role, "content": content})
        if roles[index + 1 : index + 2] == ["tool"]:
            messages[-1]["tool_calls"] = [call]
        elif role == "tool":
            messages[-1] |= {"tool_call_id": TOOL_CALL["id"], "name": "f"}
    return messages

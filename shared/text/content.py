"""The form of `content` that a chat template reads, found by rendering probes of each form when a model is loaded.

Most templates print a string. Some loop over a list of parts and print each part's text; given a string they print
nothing, and the user's words are gone without an error. Others read the first part only. Nothing in a template's source
tells these apart for certain, so each role is probed with two texts, and the first form that shows both is the one that
messages of this role get. A string comes first: templates that take it keep getting it.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

from msgspec import Struct

from shared.errors import InvalidRequest

Message: TypeAlias = dict[str, Any]
Content: TypeAlias = str | list[dict[str, Any]]
Render: TypeAlias = Callable[[list[Message]], str]

TEXTS = ("7041776295", "3920518467")  # digits, since templates change letters' case
DECOY = "8156340972"
"""A value that each part of a probe holds beside its text: shown, it tells that the list was printed as it is."""

CALL: dict[str, Any] = {"id": "callid001", "type": "function", "function": {"name": "f", "arguments": {}}}

PROBES = {  # the user's first, since no other role comes without one
    "user": ("user", "system user", "user assistant user"),
    "system": ("system user", "system user assistant user"),
    "assistant": ("user assistant user", "system user assistant user", "user assistant"),
    "tool": ("user assistant tool", "system user assistant tool"),
}
"""Conversations to probe a role in, the roles in their order. A template may raise for any of them."""

ALIASES = {"developer": "system", "function": "tool"}


def text_part(text: str) -> Message:
    """A part of a message's content."""
    return {"type": "text", "text": text}


class Form(Enum):
    """How a template wants the texts of one message."""

    STRING = "string"
    PARTS = "parts"
    ONE_PART = "one part"  # a list of which it reads one item only

    def write(self, parts: Sequence[Message]) -> Content:
        """The content made of these text parts, their texts joined by newlines where there is room for only one.

        Parts that stay parts keep the fields that a client wrote beside the text, which some templates read.
        """
        text = "\n".join(part["text"] for part in parts)
        if self is Form.STRING:
            return text
        if len(parts) == 1 or (parts and self is Form.PARTS):
            return list(parts)
        return [text_part(text)]  # never an empty list: templates look at the first item


PROBE = [text_part(text) for text in TEXTS]


class ContentForms(Struct, frozen=True):
    """The form for each role. `shows_nothing` says that no form of a user's message is seen in what comes out."""

    by_role: Mapping[str, Form] = {}
    shows_nothing: bool = False

    def of(self, role: str) -> Form:
        """The form for messages of `role`; a role that could not be probed has the user's."""
        found = self.by_role.get(ALIASES.get(role, role))
        return found or self.by_role.get("user", Form.STRING)


def find_forms(render: Render) -> ContentForms:
    """Probe a template. `render` raises `InvalidRequest` for conversations that the template does not take."""
    found: dict[str, Form] = {}
    for role in PROBES:
        form, rendered = _probe(render, role, found)
        if form is not None:
            found[role] = form
        elif role == "user":
            return ContentForms(shows_nothing=rendered)
    return ContentForms(found)


def _probe(render: Render, role: str, found: Mapping[str, Form]) -> tuple[Form | None, bool]:
    """The first form that shows a role's texts, and whether the template rendered any conversation at all."""
    rendered = False
    for conversation, form in itertools.product(PROBES[role], Form):
        try:
            output = render(_conversation(conversation.split(), role, form, found))
        except InvalidRequest:
            continue
        if DECOY not in output and all(text in output for text in TEXTS):
            return form, True
        rendered = True
    return None, rendered


def _conversation(roles: list[str], role: str, form: Form, found: Mapping[str, Form]) -> list[Message]:
    """Messages of these roles; those of `role` hold the probe's texts, the others a word in the form found for them."""
    messages: list[Message] = []
    for at, one in enumerate(roles):
        content = form.write(PROBE) if one == role else found.get(one, form).write([text_part("1")])
        if isinstance(content, list):
            content = [part | {"decoy": DECOY} for part in content]
        messages.append({"role": one, "content": content})
        if roles[at + 1 : at + 2] == ["tool"]:
            messages[-1]["tool_calls"] = [CALL]
        elif one == "tool":
            messages[-1] |= {"tool_call_id": CALL["id"], "name": "f"}
    return messages

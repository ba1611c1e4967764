"""The parts of a model's message, as a parser of its output finds them: content, reasoning and tool calls."""

from typing import TypeAlias

from msgspec import Struct


class Content(Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class Reasoning(Struct, frozen=True, gc=False):
    """Text that the model wrote before its answer, to think."""

    text: str


class Span(Struct, frozen=True, gc=False):
    """Where reasoning is in a text, in characters: from `begin` to `end`, and `after` is behind its end marker.

    The last two are None while they have not come.
    """

    begin: int
    end: int | None = None
    after: int | None = None


class CallBegin(Struct, frozen=True, gc=False):
    """The beginning of a tool call. The calls of a message are numbered from 0."""

    index: int
    id: str
    name: str


class CallArguments(Struct, frozen=True, gc=False):
    """A piece of a call's arguments.

    The pieces of a call joined are what the model wrote: a JSON object if it kept to its format and was not cut off.
    They are passed on before that shows, so whoever makes the call must check them.
    """

    index: int
    text: str


Delta: TypeAlias = Content | Reasoning | CallBegin | CallArguments

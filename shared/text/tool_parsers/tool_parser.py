"""`ToolParser`: what the parsers of all families share. It takes tool calls out of the text of an answer.

A family's parser says by which markers its calls begin, and reads what follows one (`_read_calls`). If that turns out
not to be a call, the marker was text, and so is what was read behind it. That is not read again, so that no output can
keep a parser busy for long. White space beside a call is no content.
"""

import re
import secrets
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

from shared.text.deltas import CallArguments, CallBegin, Content
from shared.text.stream_parser import StreamParser, TrailingSpace
from shared.text.text_reader import Parsing
from shared.text.tool_parsers.call_grammar import CallGrammar

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""

NAME = re.compile(r"[\w.-]*")
"""The characters of a tool's name."""

MAX_NAME = 64
"""The maximum number of characters of a tool's name, which is OpenAI's. The gateway takes no longer ones."""


class Frame(NamedTuple):
    """The expressions of a grammar around and between calls."""

    begin: str = ""
    separator: str = ""
    end: str = ""


class ToolParser(StreamParser):
    """Takes calls of `tools` out of a text. `special` are the markers that are special tokens of the vocabulary.

    Those are never content, wherever the model writes them.
    """

    begins: ClassVar[tuple[str, ...]]
    """Markers that begin a call."""

    ends: ClassVar[tuple[str, ...]] = ()
    """Markers that end a call."""

    frames: ClassVar[tuple[str, ...]] = ()
    """Markers around calls, which mean nothing by themselves."""

    opens_by_marker: ClassVar[bool] = True
    """Whether calls of the grammar begin with a marker, by which they are told apart from text."""

    def __init__(self, tools: Tools, special: Collection[str] = ()) -> None:
        super().__init__()
        self.num_calls = 0
        self.num_complete = 0
        self._tools = tools
        self._special = special
        self._at_line_start = True  # nothing but white space is in the last line of the content
        self._space = TrailingSpace()  # of the content, which is dropped if a call follows
        self._follows_call = False
        self._call_is_open = False  # the last call has not come to its end

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Return all markers. Those that are special tokens of a vocabulary must be in the text that is parsed."""
        return cls.begins + cls.ends + cls.frames

    @classmethod
    def grammar(
        cls, tools: Tools, token_ids: Mapping[str, int], *, parallel: bool = True, in_text: bool = False
    ) -> str:
        """Return a grammar of a call of one of `tools`, or of several, for llguidance (`call_grammar.py`).

        `token_ids` are the ids of those markers that are tokens of the vocabulary, special or not. If `in_text`, it is
        a grammar of any text that may have calls. Raise `InvalidRequest` for a schema that is none.
        """
        grammar = CallGrammar(token_ids, in_text=in_text)
        calls = [cls._call(grammar, name, schema) for name, schema in tools.items()]
        if in_text and not cls.opens_by_marker:
            lines = [cls._line(grammar, name, schema, parallel) for name, schema in tools.items()]
            return grammar.in_lines(lines, calls, cls.begins[0] if len(cls.begins) > 1 else "", parallel=parallel)
        frame = cls._frame(grammar)
        return grammar.finish(frame.begin, calls, frame.separator, frame.end, parallel=parallel)

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> "Frame":
        """Return what a grammar has around the calls."""
        return Frame()

    @classmethod
    @abstractmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
        """Return the expression of a grammar for a call of one tool."""

    @classmethod
    def _line(cls, grammar: CallGrammar, name: str, schema: Mapping[str, Any], parallel: bool) -> tuple[str, str]:
        """Return one of the lines that `CallGrammar.in_lines` takes. Families whose calls have no marker need it."""
        raise NotImplementedError

    @abstractmethod
    def _read_calls(self, marker: str) -> Parsing[bool]:
        """Read what follows `marker`. Return False if it is no call, without having begun one.

        What was read of another marker is text then.
        """

    def _read_name(self) -> Parsing[str]:
        """Read the name of a tool, or as much as could be one. Return '' if none comes next."""
        return (yield from self._reader.matching(NAME, MAX_NAME))

    def _parse(self) -> Parsing[None]:
        markers = self.begins + self.frames + tuple(marker for marker in self.ends if marker in self._special)
        while marker := (yield from self._reader.until(markers, self._add_content)):
            if marker not in self.begins:
                continue
            if not (yield from self._read_calls(marker)):
                self._add_text(marker + self._reader.unreleased())
        if space := self._space.flush():
            self._deltas.append(Content(space))

    def _add_text(self, text: str) -> None:
        """Add what was taken for a call to the content."""
        for marker in self._special:
            text = text.replace(marker, "")
        self._add_content(text)

    def _add_content(self, text: str) -> None:
        if self._follows_call:
            text = text.lstrip()
            if not text or (self._reader.ended and any(marker.startswith(text) for marker in self.markers())):
                return  # the rest of the call, or of its end marker if the output was cut off
        self._follows_call = False
        _, newline, line = text.rpartition("\n")
        self._at_line_start = (self._at_line_start or newline != "") and not line.strip()
        if shown := self._space.push(text):
            self._deltas.append(Content(shown))

    def _begin_call(self, name: str, id: str | None = None) -> None:
        self._reader.release()
        self._space.drop()
        self._at_line_start = self._follows_call = self._call_is_open = True
        self._deltas.append(CallBegin(self.num_calls, id or self._new_id(), name))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last. What was read is released."""
        self._reader.release()
        if text:
            self._deltas.append(CallArguments(self.num_calls - 1, text))

    def _end_call(self) -> None:
        """Say that the call that began last has all of its arguments."""
        self._reader.release()
        self.num_complete += 1
        self._call_is_open = False

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

"""Takes a model's reasoning apart from its answer. Most families write it first, between two markers.

A family is a row of `FAMILIES`. gpt-oss has a format of its own (`harmony.py`).
"""

from collections.abc import Collection, Mapping

from msgspec import Struct

from shared.text.deltas import Content, Reasoning, Span
from shared.text.stream_parser import StreamParser, TrailingSpace
from shared.text.text_reader import Parsing


class ReasoningFamily(Struct, frozen=True):
    """How a family writes its reasoning."""

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    also_ends: tuple[str, ...] = ()  # markers of what follows, which end the reasoning if its own end is missing
    begins_open: bool = False  # the output is reasoning from its start, unless the prompt has ended it

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begins + self.ends + self.also_ends

    def is_open(self, prompt: str) -> bool:
        """Return whether the output continues reasoning that begins in the prompt, or needs no beginning."""
        end = prompt.rstrip()
        return end.endswith(self.begins) or (self.begins_open and not end.endswith(self.ends))

    def is_open_in(self, content: str) -> bool:
        """Return whether the beginning of a message ends inside reasoning."""
        return max(map(content.rfind, self.begins)) > max(map(content.rfind, self.ends))


FAMILIES: Mapping[str, ReasoningFamily] = {
    "qwen3": ReasoningFamily(),
    "deepseek_r1": ReasoningFamily(begins_open=True),
    "glm45": ReasoningFamily(),
    "kimi_k2": ReasoningFamily(also_ends=("<|tool_calls_section_begin|>",)),
    "granite": ReasoningFamily(
        begins=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
}


class ReasoningParser(StreamParser):
    """Takes reasoning at the beginning of a text apart. `is_open`: the text begins inside it.

    White space around reasoning, and newlines before the answer, belong to the format. `special` are markers that are
    special tokens, which are never content.
    """

    def __init__(self, family: ReasoningFamily, *, is_open: bool, special: Collection[str] = ()) -> None:
        super().__init__()
        self.spans: list[Span] = []  # one at most
        self._family = family
        self._is_open = is_open
        self._special = special
        self._space = TrailingSpace()  # of the reasoning, which is never shown

    def _parse(self) -> Parsing[None]:
        reader, family = self._reader, self._family
        yield from reader.skip_space()
        if (yield from reader.literal(*family.begins)) or self._is_open:
            yield from reader.skip_space()
            reader.release()
            begin = reader.position
            self.spans = [Span(begin)]
            marker = yield from reader.until(family.ends + family.also_ends, self._add_reasoning)
            self.spans = [Span(begin, reader.position - len(marker), reader.position)]
            if marker in family.also_ends:
                self._add_content(marker)
            yield from reader.skip(" ")
            yield from reader.skip("\r\n")  # and no spaces behind them, which may indent the answer
            reader.release()
        else:
            reader.restart()
        stray = tuple(marker for marker in family.begins + family.ends if marker in self._special)
        while (yield from reader.until(stray, self._add_content)):
            pass

    def _add_reasoning(self, text: str) -> None:
        if shown := self._space.push(text):
            self._deltas.append(Reasoning(shown))

    def _add_content(self, text: str) -> None:
        self._deltas.append(Content(text))

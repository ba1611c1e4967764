"""`MessageParser`: takes the text of an output apart into content, reasoning and tool calls.

Which parsers a model needs is chosen once (`ParserChoice`), by name or by the markers in its chat template. What a
request needs of them is a `MessageFormat`, from which each of its samples gets a parser.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from shared.errors import ConfigError
from shared.text import reasoning_parsers, tool_parsers
from shared.text.deltas import CallArguments, CallBegin, Content, Delta, Span
from shared.text.harmony import SPECIAL_TOKENS, HarmonyParser
from shared.text.reasoning_parsers import ReasoningParser
from shared.text.tokenizer import Tokenizer
from shared.text.tool_parsers.tool_parser import ToolParser, Tools

AUTO, NONE = "auto", "none"
HARMONY_TOOLS, HARMONY_REASONING = "openai", "openai_gptoss"

TOOL_PARSERS = (*tool_parsers.FAMILIES, HARMONY_TOOLS)
REASONING_PARSERS = (*reasoning_parsers.FAMILIES, HARMONY_REASONING)

Markers: TypeAlias = Sequence[tuple[tuple[str, ...], str]]

TOOL_MARKERS: Markers = (
    (("<|channel|>", "<|message|>"), HARMONY_TOOLS),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v31"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("<|tool|>",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("[func_name1(",), "llama4_pythonic"),
    (('{"name": function name, "parameters":',), "llama3_json"),
    (("<|python_tag|>",), "llama3_json"),
)
"""Texts in chat templates by which a family's are known. The first row of which all texts are there counts."""

REASONING_MARKERS: Markers = (
    (("<|channel|>", "<|message|>"), HARMONY_REASONING),
    (("<|tool_calls_section_begin|>", "<think>"), "kimi_k2"),
    (("Here is my thought process",), "granite"),
    (("</think>",), "qwen3"),
    (("<think>",), "qwen3"),
)
"""The same for reasoning."""

PIECE = 512
"""Characters that are parsed at a time. A parser copies what it has not read of them."""


class Stage(Protocol):
    """A parser of a text, or of the content that the one before it has found."""

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


class MessageParser:
    """Parses one sample's text. `feed` takes it in pieces, and `finish` ends it.

    The text is parsed for reasoning first, and what is not reasoning for calls. Only the first call is kept unless
    `parallel`.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | HarmonyParser | None,
        tools: ToolParser | HarmonyParser | None,
        parallel: bool,
    ) -> None:
        stages = [stage for stage in (reasoning, tools) if stage is not None]
        self._stages: Sequence[Stage] = stages if reasoning is not tools else stages[:1]
        self._reasoning, self._tools = reasoning, tools
        self._parallel = parallel

    def feed(self, text: str) -> list[Delta]:
        """Return what `text` adds to the message."""
        deltas: list[Delta] = []
        for start in range(0, len(text), PIECE):
            deltas += self._feed(0, text[start : start + PIECE])
        return deltas

    def finish(self) -> list[Delta]:
        """Return what was held back, since it could have been part of a marker. No more text comes."""
        deltas: list[Delta] = []
        for index, stage in enumerate(self._stages):
            deltas += self._pass_on(index, stage.finish())
        return deltas

    @property
    def has_calls(self) -> bool:
        """Return whether there are calls, and all of them are complete."""
        if self._tools is None or not self._tools.num_calls:
            return False
        return self._tools.num_complete >= (self._tools.num_calls if self._parallel else 1)

    @property
    def reasoning_spans(self) -> Sequence[Span]:
        """Return where reasoning is in the text so far."""
        return () if self._reasoning is None else self._reasoning.spans

    def is_reasoning(self, offset: int) -> bool:
        """Return whether a character is part of reasoning or of its end marker, which may not be complete yet."""
        spans = self.reasoning_spans
        return any(span.begin <= offset and (span.after is None or offset < span.after) for span in spans)

    def _feed(self, index: int, text: str) -> list[Delta]:
        return self._pass_on(index, self._stages[index].feed(text))

    def _pass_on(self, index: int, deltas: Sequence[Delta]) -> list[Delta]:
        """Parse the content in what a stage has found by the next stage."""
        if index + 1 == len(self._stages):
            return [delta for delta in deltas if self._keeps(delta)]
        result: list[Delta] = []
        for delta in deltas:
            result += self._feed(index + 1, delta.text) if isinstance(delta, Content) else [delta]
        return result

    def _keeps(self, delta: Delta) -> bool:
        return self._parallel or not isinstance(delta, (CallBegin, CallArguments)) or delta.index == 0


class MessageFormat(Struct, frozen=True):
    """What the outputs of one request may hold besides content.

    `tools` are those that the model may call. None: calls are not looked for.
    """

    choice: "ParserChoice"
    tools: Tools | None = None
    parallel: bool = True
    reasoning_is_open: bool = False  # the prompt ends inside reasoning
    reasoning_is_over: bool = False  # the prompt has ended it, or left it out

    def parser(self) -> MessageParser:
        """Return a parser for one sample."""
        names, special = self.choice, self.choice.special
        if names.reasoning == HARMONY_REASONING:
            harmony = HarmonyParser(with_calls=self.tools is not None)
            return MessageParser(harmony, harmony, self.parallel)
        reasoning = tools = None
        if names.reasoning is not None:
            family = reasoning_parsers.FAMILIES[names.reasoning]
            reasoning = ReasoningParser(family, is_open=self.reasoning_is_open, special=special)
        if names.tools is not None and self.tools is not None:
            tools = tool_parsers.FAMILIES[names.tools](self.tools, special)
        return MessageParser(reasoning, tools, self.parallel)

    @property
    def has_reasoning(self) -> bool:
        return self.choice.reasoning is not None

    @property
    def token_ids(self) -> frozenset[int]:
        """Return the special tokens that the parser must see in the text."""
        special = self.choice.special
        return frozenset(special[marker] for marker in self.choice.markers(self.tools is not None) if marker in special)


class ParserChoice(Struct, frozen=True):
    """The parsers of a model, by name. None: its outputs have no reasoning, or no calls, that could be told apart."""

    reasoning: str | None = None
    tools: str | None = None
    special: Mapping[str, int] = {}  # ids of the markers that are special tokens
    token_ids: Mapping[str, int] = {}  # of all markers that are tokens

    @classmethod
    def make(cls, template: str, tokenizer: Tokenizer, *, tool_parser: str, reasoning_parser: str) -> "ParserChoice":
        """Return the parsers that these values of --tool-call-parser and --reasoning-parser choose.

        Raise `ConfigError` for an unknown one.
        """
        check_names(tool_parser, reasoning_parser)
        tools = _choose(tool_parser, TOOL_MARKERS, template)
        reasoning = _choose(reasoning_parser, REASONING_MARKERS, template)
        if reasoning == HARMONY_REASONING or tools == HARMONY_TOOLS:  # one parser takes everything apart
            tools, reasoning = HARMONY_TOOLS, HARMONY_REASONING
        choice = cls(reasoning, tools)
        markers = choice.markers(with_tools=True)
        ids = {marker: id for marker in markers if (id := tokenizer.token_id(marker)) is not None}
        special = {marker: id for marker, id in ids.items() if id in tokenizer.special_ids}
        return cls(reasoning, tools, special, ids)

    def markers(self, with_tools: bool) -> Collection[str]:
        """Return the markers that the parsers look for, with those of calls or without."""
        if self.reasoning == HARMONY_REASONING:
            return SPECIAL_TOKENS
        markers: tuple[str, ...] = ()
        if self.reasoning is not None:
            markers += reasoning_parsers.FAMILIES[self.reasoning].markers
        if self.tools is not None and with_tools:
            markers += tool_parsers.FAMILIES[self.tools].markers()
        return markers

    def reasoning_is_open(self, prompt: str, continued: str | None = None) -> bool:
        """Return whether the output begins inside reasoning.

        `continued` is the content of the message that the output continues, or None if it begins one.
        """
        family = reasoning_parsers.FAMILIES.get(self.reasoning or "")
        if family is None:
            return False
        return family.is_open(prompt) if continued is None else family.is_open_in(continued)

    def reasoning_is_over(self, prompt: str, continued: str | None = None) -> bool:
        """Return whether the output has no reasoning, as it continues an answer, or the prompt has closed it.

        The arguments are those of `reasoning_is_open`.
        """
        if continued is not None:
            return not self.reasoning_is_open(prompt, continued)
        family = reasoning_parsers.FAMILIES.get(self.reasoning or "")
        return family is not None and prompt.rstrip().endswith(family.ends)


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raise `ConfigError` unless there are such parsers."""
    for flag, name, known in (
        ("--tool-call-parser", tool_parser, TOOL_PARSERS),
        ("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name not in (AUTO, NONE, *known):
            raise ConfigError(f"{flag} {name} is unknown; there are: {AUTO}, {NONE}, {', '.join(sorted(known))}")


def _choose(name: str, markers: Markers, template: str) -> str | None:
    if name != AUTO:
        return None if name == NONE else name
    return next((family for texts, family in markers if all(text in template for text in texts)), None)

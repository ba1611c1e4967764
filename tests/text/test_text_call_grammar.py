"""Tests of the grammars of calls, with llguidance: they take what the families write, and nothing else."""

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from shared.text.harmony import SPECIAL_TOKENS, HarmonyParser
from shared.text.message_parser import MessageFormat, MessageParser, ParserChoice
from shared.text.tool_parsers import FAMILIES
from tests.text.tool_outputs import WRITERS, Call, read
from tests.text.vocabulary import make_backend

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
TOOLS: dict[str, Any] = {"get_weather": PARAMETERS, "get_time": {}, "any": {"properties": {"a": {}, "b": {}}}}

WEATHER = Call("get_weather", {"city": 'Sã "o" \\ <x>\nP', "days": 3})
MORE = Call("get_weather", {"city": "", "days": -3, "unit": "F", "place": {"x": 1.5}})
TIME = Call("get_time", {})

WRONG = [
    Call("get_weather", {"city": "x", "days": "three"}),
    Call("get_weather", {"city": "x", "days": 3, "unit": "K"}),
    Call("get_weather", {"days": 3}),
    Call("get_weather", {"city": "x", "days": 3, "place": {"x": "far"}}),
    Call("get_wether", {"city": "x", "days": 3}),
    Call("get_time", {"zone": "CET"}),
]


def markers_of(family: str) -> tuple[str, ...]:
    return SPECIAL_TOKENS if family == "openai" else FAMILIES[family].markers()


def grammar_of(family: str, token_ids: dict[str, int], *, parallel: bool = True) -> str:
    make = HarmonyParser.grammar if family == "openai" else FAMILIES[family].grammar
    return make(TOOLS, token_ids, parallel=parallel)


def parser_for(family: str) -> MessageParser:
    reasoning = "openai_gptoss" if family == "openai" else None
    return MessageFormat(ParserChoice(reasoning, family), TOOLS).parser()


class Matcher:
    """Matches texts with a family's grammar, with its markers as tokens or as text."""

    def __init__(self, family: str, *, tokens: bool, parallel: bool = True) -> None:
        self._backend: Tokenizer = make_backend()
        markers = [marker for marker in markers_of(family) if marker not in ("[", "{", "<function=", "functools[")]
        if tokens:
            self._backend.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
        token_ids = {marker: id for marker in markers if (id := self._backend.token_to_id(marker)) is not None}
        self._grammar = grammar_of(family, token_ids, parallel=parallel)
        self._tokenizer = LLTokenizer(self._backend.to_str())
        assert not (error := LLMatcher.validate_grammar(self._grammar, self._tokenizer)), error

    def matches(self, text: str) -> bool:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        matcher = LLMatcher(self._tokenizer, self._grammar)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def write(family: str, tokens: bool, calls: list[Call]) -> str:
    """Return calls as the grammar has them: Python's values are JSON, and Mistral's form depends on its tokens."""
    if family == "mistral" and not tokens:
        return "[TOOL_CALLS]" + WRITERS["granite"](calls).removeprefix("<|tool_call|>")
    text = WRITERS[family](calls).removeprefix("\n")
    if family in ("phi4_mini_json",):
        return text.replace("functools", "<|tool_call|>") + "<|/tool_call|>"
    return text


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("family", sorted(set(WRITERS) - {"pythonic", "llama4_pythonic", "lfm2"}))
def test_what_a_family_writes_matches_its_grammar(family: str, tokens: bool) -> None:
    matcher = Matcher(family, tokens=tokens)
    conversations = [[WEATHER], [MORE], [TIME]] + ([[WEATHER, TIME, MORE]] if family != "openai" else [])
    for calls in conversations:
        text = write(family, tokens, calls)
        assert matcher.matches(text)
        assert not matcher.matches(text[:-1])
        assert not matcher.matches("Well. " + text)
    for call in WRONG:
        assert not matcher.matches(write(family, tokens, [call]))


@pytest.mark.parametrize("family", ["pythonic", "llama4_pythonic", "lfm2"])
def test_calls_like_pythons(family: str) -> None:
    begin = FAMILIES[family].begins[0] + ("[" if FAMILIES[family].ends else "")
    end = "]" + "".join(FAMILIES[family].ends)
    matcher = Matcher(family, tokens=False)
    right = {
        'get_weather(city="x \\"y\\"", days=3)': {"city": 'x "y"', "days": 3},
        'get_weather(city="x", days=3, place={"x": 1.5})': {"city": "x", "days": 3, "place": {"x": 1.5}},
        "get_time(), any(a=null, b=[true])": {},
        "any(b=1)": {"b": 1},
        "any()": {},
    }
    for text, arguments in right.items():
        assert matcher.matches(begin + text + end)
        name = text.partition("(")[0]
        call, *_ = read(parser_for(family), begin + text + end).parsed().calls
        assert call == Call(name, arguments)
    for text in ('get_weather(city="x", days="y")', "get_weather(days=3)", "get_wether()", "get_time(a=1)", ""):
        assert not matcher.matches(begin + text + end)


@pytest.mark.parametrize("family", sorted(set(WRITERS) - {"pythonic", "llama4_pythonic", "lfm2"}))
def test_one_call_only_if_calls_are_not_to_be_parallel(family: str) -> None:
    matcher = Matcher(family, tokens=True, parallel=False)
    assert matcher.matches(write(family, True, [WEATHER]))
    assert not matcher.matches(write(family, True, [WEATHER, TIME]))


@pytest.mark.parametrize("family", sorted(WRITERS))
def test_what_a_grammar_lets_through_is_what_the_parser_reads(family: str) -> None:
    """Tokens that the grammar allows, taken at random, are calls of the tools with arguments in JSON."""
    backend = make_backend()
    tokenizer, grammar, draw = LLTokenizer(backend.to_str()), grammar_of(family, {}), random.Random(family)
    num_read = 0
    while num_read < 5:
        if text := write_at_random(LLMatcher(tokenizer, grammar), backend, draw):
            num_read += 1
            message = read(parser_for(family), text)
            assert message.has_calls, text
            assert (message.content, message.reasoning) == ("", "")
            assert all(name in TOOLS and isinstance(json.loads(arguments), dict) for name, arguments in message.calls)


def write_at_random(matcher: LLMatcher, backend: Tokenizer, draw: random.Random, max_tokens: int = 1000) -> str:
    """Return a text of allowed tokens that ends where it may; '' if it does not within `max_tokens`."""
    ids: list[int] = []
    while not matcher.is_accepting():
        if len(ids) == max_tokens:
            return ""
        bias = matcher.compute_logit_bias()
        allowed = [id for id in range(4, backend.get_vocab_size()) if bias[id]]
        closing = [id for id in allowed if backend.id_to_token(id) in '"}]<>)/'] if draw.random() < 0.6 else []
        ids.append(draw.choice(closing or allowed))
        assert matcher.consume_token(ids[-1])
    return str(backend.decode(ids))

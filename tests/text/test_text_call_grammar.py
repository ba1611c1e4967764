"""Tests of the grammars of calls, with llguidance: they take what the families write, and nothing else."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from shared.errors import InvalidRequest
from shared.text.harmony import SPECIAL_TOKENS, HarmonyParser
from shared.text.message_parser import MessageFormat, MessageParser, ParserChoice
from shared.text.tool_parsers import FAMILIES
from tests.text.grammar_matcher import Matcher
from tests.text.tool_outputs import WRITERS, Call, read
from tests.text.vocabulary import make_backend

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "day": {"const": "today"},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
TOOLS: dict[str, Any] = {"get_weather": PARAMETERS, "get_time": {}, "any": {"properties": {"a": {}, "b": {}}}}

WEATHER = Call("get_weather", {"city": 'Sã "o" \\ <x>\nP', "days": 3})
MORE = Call("get_weather", {"city": "", "days": -3, "unit": "F", "day": "today", "place": {"x": 1.5}})
TIME = Call("get_time", {})

WRONG = [
    Call("get_weather", {"city": "x", "days": "three"}),
    Call("get_weather", {"city": "x", "days": 3, "unit": "K"}),
    Call("get_weather", {"city": "x", "days": 3, "day": "never"}),
    Call("get_weather", {"days": 3}),
    Call("get_weather", {"city": "x", "days": 3, "place": {"x": "far"}}),
    Call("get_wether", {"city": "x", "days": 3}),
    Call("get_time", {"zone": "CET"}),
]


def markers_of(family: str) -> tuple[str, ...]:
    return SPECIAL_TOKENS if family == "openai" else FAMILIES[family].markers()


def grammar_of(family: str, token_ids: Mapping[str, int], *, parallel: bool = True, in_text: bool = False) -> str:
    if family == "openai":
        return HarmonyParser.grammar(TOOLS, token_ids)
    return FAMILIES[family].grammar(TOOLS, token_ids, parallel=parallel, in_text=in_text)


def parser_for(family: str) -> MessageParser:
    reasoning = "openai_gptoss" if family == "openai" else None
    return MessageFormat(ParserChoice(reasoning, family), TOOLS).parser()


def matcher_of(family: str, *, tokens: bool, parallel: bool = True, in_text: bool = False) -> Matcher:
    return Matcher(
        markers_of(family), lambda ids: grammar_of(family, ids, parallel=parallel, in_text=in_text), tokens=tokens
    )


def write(family: str, tokens: bool, calls: list[Call]) -> str:
    """Return calls as the grammar has them: Python's values are JSON, and Mistral's form depends on its tokens."""
    if family == "mistral" and not tokens:
        return "[TOOL_CALLS]" + WRITERS["granite"](calls).removeprefix("<|tool_call|>")
    text = WRITERS[family](calls).removeprefix("\n").removesuffix("<|call|>")  # which ends an output, and is no text
    if family == "phi4_mini_json":
        return text.replace("functools", "<|tool_call|>") + "<|/tool_call|>"
    return text


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("family", sorted(set(WRITERS) - {"pythonic", "llama4_pythonic", "lfm2"}))
def test_what_a_family_writes_matches_its_grammar(family: str, tokens: bool) -> None:
    matcher = matcher_of(family, tokens=tokens)
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
    matcher = matcher_of(family, tokens=False)
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
    matcher = matcher_of(family, tokens=True, parallel=False)
    assert matcher.matches(write(family, True, [WEATHER]))
    assert not matcher.matches(write(family, True, [WEATHER, TIME]))


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("family", [name for name in sorted(FAMILIES) if FAMILIES[name].opens_by_marker])
def test_calls_in_text_are_right_too(family: str, tokens: bool) -> None:
    matcher = matcher_of(family, tokens=tokens, in_text=True)
    written = [write_in_text(family, tokens, calls) for calls in ([WEATHER], [MORE], [TIME])]
    for text in ("", "Well <b> [x] {", *written, f"One\n{written[0]}\n\nTwo {{", f"{written[0]} and {written[1]}"):
        assert matcher.matches(text), text
    for call in WRONG:
        text = "Well. " + write_in_text(family, tokens, [call])
        assert not matcher.matches(text), text
    assert not matcher.matches("Well. " + written[0][:-1])
    assert matcher_of(family, tokens=tokens, in_text=True, parallel=False).matches(f"One {written[0]} two")


def write_in_text(family: str, tokens: bool, calls: list[Call]) -> str:
    """Return calls as the grammar has them. LFM2's and Llama 4's are like Python's, with values in JSON."""
    if family not in ("lfm2", "llama4_pythonic"):
        return write(family, tokens, calls)
    values = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in calls[0].arguments.items()]
    begin, end = FAMILIES[family].begins[0], FAMILIES[family].ends[0]
    return f"{begin}[{calls[0].name}({', '.join(values)})]{end}"


PYTHONS = '[get_weather(city="x", days=3)]'
JSONS = '{"name": "get_weather", "parameters": {"city": "x", "days": 3}}'
IN_LINES: dict[str, tuple[list[str], list[str]]] = {  # calls that are right, and texts that only look like calls
    "llama3_json": (
        [
            JSONS,
            '{ "type": "function", "name": "get_weather",\n"parameters": {"city": "x", "days": 3} }',
            '{"name": "get_time", "arguments": {}}',
        ],
        ['{"a": [1]}', '{"name": "Ann"}', "{", f"Say {JSONS}", "[1]"],
    ),
    "pythonic": (
        [PYTHONS, '[get_time(), get_weather(city="x", days=3, place={"x": 1.5})]', "[ any(a=null)]"],
        ["[1, 2]", "[get_weather]", f"Say {PYTHONS}", "{}", "["],
    ),
}


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("family", IN_LINES)
def test_calls_without_a_marker_in_text(family: str, tokens: bool) -> None:
    """A line that begins as the parser takes it for a call is one, and other text is free."""
    matcher = matcher_of(family, tokens=tokens, in_text=True)
    one = matcher_of(family, tokens=tokens, in_text=True, parallel=False)
    calls, texts = IN_LINES[family]
    for text in ("", "Well.", *calls, *texts):
        for before in ("", "One\n", "\n  "):
            assert matcher.matches(before + text), before + text
            assert one.matches(before + text) or ", get_weather" in text
        parsed = read(parser_for(family), f"One\n{text}").parsed()
        assert len(parsed.calls) == (text in calls) * (1 + text.count(", get_weather")), text
    assert matcher.matches(f"One\n{calls[0]}\n{calls[1]}\nTwo")
    for call in calls[:2]:
        for wrong in (call.replace("3", '"3"'), call.replace("days", "day"), call.replace("city", "town")):
            for before in ("", "One\n", f"{calls[0]} ", f"{calls[0]}\n"):
                assert not matcher.matches(before + wrong), before + wrong
    assert not matcher.matches(calls[0][:-1])


def test_calls_of_llama_behind_its_marker() -> None:
    matcher = matcher_of("llama3_json", tokens=True, in_text=True)
    assert matcher.matches(f"Well <|python_tag|>{JSONS}; {JSONS}")
    assert not matcher.matches("Well <|python_tag|>" + JSONS.replace("3", '"3"'))


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm45", "lfm2"])
def test_a_schema_that_is_none_is_refused(family: str) -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"properties": {"a": deep}}
    wrong: list[Any] = [deep]
    if family != "hermes":  # whose whole schema is llguidance's to check
        wrong += [{"properties": [1]}, {"properties": {"a": 1}}, {"required": "abc"}]
    for schema in wrong:
        with pytest.raises(InvalidRequest, match="schema"):
            FAMILIES[family].grammar({"f": schema}, {})
    assert FAMILIES[family].grammar({"f": {"properties": {"a": True, "b": False}}}, {})


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

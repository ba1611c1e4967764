"""Calls of Granite 3 and Phi-4-mini, as a JSON list behind a marker:

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]
"""

from shared.text.tool_parsers.call_grammar import CallGrammar
from shared.text.tool_parsers.json_calls import JsonCallParser
from shared.text.tool_parsers.tool_parser import Frame


class GraniteParser(JsonCallParser):
    """Granite 3.0 to 3.3. The later ones write the marker as text at times."""

    begins = ("<|tool_call|>", "<tool_call>")

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        return Frame(f"{grammar.opening(cls.begins[0])} {grammar.text('[')}", grammar.text(", "), grammar.text("]"))


class Phi4MiniParser(JsonCallParser):
    """Phi-4-mini. Its makers' own examples begin a list by the word functools."""

    begins = ("<|tool_call|>", "functools[")
    ends = ("<|/tool_call|>",)

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        begin, end = grammar.opening(cls.begins[0]), grammar.marker(cls.ends[0])
        return Frame(f"{begin} {grammar.text('[')}", grammar.text(", "), f"{grammar.text(']')} {end}")

"""Calls of Hermes, Qwen 2.5 and 3, and Granite 4, as JSON between tags:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from shared.text.tool_parsers.call_grammar import CallGrammar, Schema
from shared.text.tool_parsers.json_calls import JsonCallParser
from shared.text.tool_parsers.tool_parser import Frame


class HermesParser(JsonCallParser):
    """Each call has tags of its own. Several within one pair are taken too."""

    begins = ("<tool_call>",)
    ends = ("</tool_call>",)

    @classmethod
    def _call(cls, grammar: CallGrammar, name: str, schema: Schema) -> str:
        begin, end = grammar.opening(cls.begins[0]), grammar.marker(cls.ends[0])
        newline = grammar.text("\n")
        return f"{begin} {newline} {cls._object(grammar, name, schema)} {newline} {end}"

    @classmethod
    def _frame(cls, grammar: CallGrammar) -> Frame:
        return Frame(separator=grammar.text("\n"))

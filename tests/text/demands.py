"""Strategies for demands on the form of an output, which may be right or wrong in any way."""

from typing import Any

from hypothesis import strategies as st

from tests.text.test_text_valid_outputs import schemas

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**65), 2**65), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
KEYWORDS = (
    *("type", "properties", "required", "items", "prefixItems", "additionalProperties", "patternProperties", "enum"),
    *("const", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "pattern", "format", "minLength", "maxLength"),
    *("minimum", "maximum", "multipleOf", "minItems", "maxItems", "uniqueItems", "$schema", "x-guidance", "title"),
)
VALUES: tuple[Any, ...] = (
    "string",
    "object",
    "#",
    "#/$defs/a",
    "date",
    "a",
    "[a-z]{1,3}",
    "(",
    0,
    -1,
    10**30,
    1e300,
    True,
    [],
    {},
)
wild_schemas = st.recursive(
    st.dictionaries(st.sampled_from(KEYWORDS), st.one_of(JSON, st.sampled_from(VALUES)), max_size=4),
    lambda inner: st.dictionaries(
        st.sampled_from(KEYWORDS),
        st.one_of(inner, st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b"]), inner)),
        min_size=1,
        max_size=3,
    ),
    max_leaves=5,
)
any_schemas = st.one_of(schemas, wild_schemas, JSON)

regexes = st.one_of(
    st.text(st.sampled_from(list(r"\[](){}|*+?.^$dw,-01ab\n")), max_size=20),
    st.from_regex(r"(\[[a-c]+\]|\\[dws]|[ab])(\{[0-9],?[0-9]{0,3}\}|[*+?])?(\|x)?", fullmatch=True),
)
pieces = [
    *"abc|()[]{}*+?~&:/\n \"'%_.",
    "start: ",
    "root ::= ",
    "A: /a/\n",
    '"x"',
    "%json {}",
    "<[3]>",
    "<a>",
    "[lazy]",
]
lark_texts = st.lists(st.sampled_from(pieces), max_size=20).map("".join)
formats: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.just({"type": "any_text"}),
        st.builds(lambda text: {"type": "const_string", "value": text}, st.text(max_size=5)),
        st.builds(lambda text: {"type": "regex", "pattern": text}, regexes),
        st.builds(lambda schema: {"type": "json_schema", "json_schema": schema}, any_schemas),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda type, elements: {"type": type, "elements": elements},
            st.sampled_from(["sequence", "or"]),
            st.lists(inner, max_size=3),
        ),
        st.builds(
            lambda type, content: {"type": type, "content": content},
            st.sampled_from(["star", "plus", "optional"]),
            inner,
        ),
        st.builds(
            lambda begin, content, end: {"type": "tag", "begin": begin, "content": content, "end": end},
            st.text(max_size=3),
            inner,
            st.text(max_size=3),
        ),
    ),
    max_leaves=5,
)

structured_outputs = st.one_of(
    st.builds(lambda schema: {"json": schema}, any_schemas),
    st.builds(lambda text: {"regex": text}, regexes),
    st.builds(lambda text: {"grammar": text}, lark_texts),
    st.builds(lambda texts: {"choice": texts}, st.one_of(st.lists(st.text(max_size=5), max_size=4), JSON)),
    st.builds(lambda format: {"structural_tag": {"format": format}}, st.one_of(formats, JSON)),
    st.dictionaries(st.sampled_from(["json", "regex", "choice", "grammar", "structural_tag", "json_object"]), JSON),
)
tools = st.lists(
    st.builds(
        lambda name, parameters, strict: {
            "type": "function",
            "function": {"name": name, "parameters": parameters, "strict": strict},
        },
        st.one_of(st.sampled_from(["f", "get_weather"]), st.text(max_size=5)),
        any_schemas,
        st.booleans(),
    ),
    max_size=2,
)

demands: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda value: {"structured_outputs": value}, structured_outputs),
    st.builds(
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        any_schemas,
    ),
    st.builds(lambda value: {"response_format": value}, JSON),
    st.builds(
        lambda name, value: {name: value},
        st.sampled_from(["guided_json", "guided_regex", "guided_choice", "guided_grammar"]),
        st.one_of(JSON, regexes, lark_texts),
    ),
)
"""Fields of a request of either endpoint."""

chat_demands: st.SearchStrategy[dict[str, Any]] = st.one_of(
    demands,
    st.builds(
        lambda tools, choice: {"tools": tools, "tool_choice": choice},
        tools,
        st.sampled_from(["auto", "required", "none", {"type": "function", "function": {"name": "f"}}]),
    ),
)

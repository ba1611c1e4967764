"""Tests that decoders return a message or raise `ProtocolError`, and nothing else, whatever a peer sends."""

from array import array
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import protocol
from shared.errors import ProtocolError
from shared.protocol import MAX_FRAME, Submit, decode_submit_id, encode, pack_tokens, unpack_tokens
from tests.shared.invalid_messages import FLOATS, INTEGERS, STRINGS, changed, leaves
from tests.shared.test_protocol_golden import EXAMPLES, SIDES

DECODERS: list[Callable[[bytes], object]] = [decode for _, decode, _ in SIDES.values()]
WHOLE = [encode(example) for example in EXAMPLES.values()]

PERMITTED: list[tuple[object, object]] = [
    *((2**64 - 1, number) for number in (2**63, 2**64 - 1)),  # the seed, which has 64 bits
    (-1, -(2**63)),  # the priority, which has 63 and a sign
]
"""Pairs of a value in the examples, and an odd value that is valid in its place."""

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=8)
nested = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def decode_all(data: bytes) -> list[object]:
    messages: list[object] = []
    for decode in DECODERS:
        try:
            messages.append(decode(data))
        except ProtocolError as error:
            assert str(error).startswith("not a message of protocol version")  # noqa: PT017  (nothing is raised here)
    return messages


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    decode_all(data)


@given(st.integers(0, 10), st.lists(nested, max_size=12))
def test_random_values_behind_a_tag(tag: int, fields: list[object]) -> None:
    decode_all(msgspec.msgpack.encode([tag, *fields]))


@settings(max_examples=500)
@given(st.sampled_from(WHOLE), st.data())
def test_mutated_messages(whole: bytes, data: st.DataObject) -> None:
    """The test changes, removes and inserts bytes. A message that still decodes can be encoded again."""
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(changed) - 1, 0)))
        match data.draw(st.sampled_from(["change", "cut", "put"])):
            case "change" if changed:
                changed[at] = data.draw(st.integers(0, 255))
            case "cut":
                del changed[at : at + data.draw(st.integers(1, 9))]
            case _:
                changed[at:at] = data.draw(st.binary(max_size=9))
    for message in decode_all(bytes(changed)):
        encode(message)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_value_is_beyond_its_range(name: str) -> None:
    """PRC-26: NaN, infinity, numbers too large for arrays and too long strings are refused in every field."""
    _, decode, _ = SIDES[name.partition(".")[0]]
    whole = encode(EXAMPLES[name])
    for path, value in leaves(msgspec.msgpack.decode(whole)):
        wrong: tuple[object, ...] = ()
        if isinstance(value, float):
            wrong = FLOATS
        elif isinstance(value, str):
            wrong = STRINGS
        elif isinstance(value, int) and not isinstance(value, bool):
            wrong = INTEGERS
        for hostile in wrong:
            if (value, hostile) in PERMITTED:
                continue
            with pytest.raises(ProtocolError):
                decode(changed(whole, path, hostile))


@pytest.mark.parametrize(
    ("field", "most"),
    [(10, protocol.MAX_LOGIT_BIAS), (12, 2 * protocol.MAX_STOP_TOKEN_IDS), (17, protocol.MAX_BAD_WORDS)],
    ids=["biases", "stops", "bad words"],
)
def test_lists_of_a_request_are_as_short_as_the_api_allows(field: int, most: int) -> None:
    """PRC-26: so a longer one costs no time before it is refused."""
    whole = encode(EXAMPLES["FROM_GATEWAY.Submit"])
    (one, *_) = msgspec.msgpack.decode(whole)[4][field - 1]
    protocol.decode_from_gateway(changed(whole, (4, field - 1), [one] * most))
    with pytest.raises(ProtocolError):
        protocol.decode_from_gateway(changed(whole, (4, field - 1), [one] * (most + 1)))


def test_texts_and_bad_words_of_a_request_are_as_long_as_the_api_allows() -> None:
    """PRC-26: so a longer one costs no time before it is refused."""
    whole = encode(EXAMPLES["FROM_GATEWAY.Submit"])
    longest: list[tuple[tuple[int, ...], object, object]] = [
        ((4, 15), bytes(protocol.MAX_VOCAB_SIZE // 8), b"\0"),
        ((4, 16, 0), [1] * protocol.MAX_BAD_WORD_TOKENS, [1]),
        ((13,), "x" * protocol.MAX_CACHE_SALT, "x"),
    ]
    for path, value, more in longest:
        protocol.decode_from_gateway(changed(whole, path, value))
        with pytest.raises(ProtocolError):
            protocol.decode_from_gateway(changed(whole, path, value + more))  # type: ignore[operator]
    with pytest.raises(ProtocolError):
        protocol.decode_from_gateway(changed(whole, (4, 16, 0), []))


def test_token_sets_have_a_bit_for_each_token() -> None:
    assert protocol.pack_token_set([]) == b""
    assert protocol.pack_token_set([0, 9, 3]) == bytes([0b1001, 0b10])


@pytest.mark.parametrize("whole", WHOLE, ids=list(EXAMPLES))
def test_the_id_of_a_submit_is_decoded_whatever_follows(whole: bytes) -> None:
    """PRC-26: so it can be refused. No other message is taken for a `Submit`."""
    is_submit = whole == encode(EXAMPLES["FROM_GATEWAY.Submit"])
    shared_tag = msgspec.msgpack.decode(whole)[0] == 2 and not is_submit  # of the other directions
    if is_submit:
        assert decode_submit_id(whole) == 9
        assert [decode_submit_id(changed(whole, (1,), id)) for id in (-1, 2**64 - 1, True, 1.5, None)] == [None] * 5
        assert decode_submit_id(changed(whole, (8,), {"a": float("nan")})) == 9
    elif not shared_tag:
        assert decode_submit_id(whole) is None
    assert decode_submit_id(whole[:2]) is None


@pytest.mark.parametrize("whole", WHOLE, ids=list(EXAMPLES))
def test_truncated_messages(whole: bytes) -> None:
    for length in range(len(whole)):
        assert decode_all(whole[:length]) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_messages_of_one_direction_do_not_pass_for_others_silently(name: str) -> None:
    """Directions share tags but not shapes. If a message fits two directions, it is the same in both."""
    others = [decode for side, (_, decode, _) in SIDES.items() if side != name.partition(".")[0]]
    for decode in others:
        try:
            message = decode(encode(EXAMPLES[name]))
        except ProtocolError:
            continue
        same = message == EXAMPLES[name]  # a heartbeat is one in every direction
        assert same or not msgspec.structs.fields(message), (name, message)  # or without fields (Stop)


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 100_000,  # nested deeper than Python's stack
        b"\xdd\xff\xff\xff\xff",  # an array that claims 4 billion elements
        b"\x92\x01\xdb\xff\xff\xff\xff",  # a string that claims 4 GB
        msgspec.msgpack.encode([2, 1, b"", 0, [1, 1]]),  # prompt_len of 0
        msgspec.msgpack.encode([2, -1, b"", 1, [1, 1]]),  # a negative id
        msgspec.msgpack.encode([3, 1, 1, 1]),  # one field too many
        msgspec.msgpack.encode([3, True]),  # not an integer
        msgspec.msgpack.encode([3, "1"]),
        msgspec.msgpack.encode([99]),  # no such tag
        msgspec.msgpack.encode({"type": 1}),
        b"",
    ],
)
def test_known_traps(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_from_gateway(data)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_tokens_survive_the_wire(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)
    assert list(unpack_tokens(packed)) == tokens
    assert pack_tokens(array("i", tokens)) == packed


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_tokens_come_in_fours_of_bytes(length: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_tokens(bytes(length))


def test_a_million_tokens_are_far_from_the_limit_of_a_frame() -> None:
    example = EXAMPLES["FROM_GATEWAY.Submit"]
    assert isinstance(example, Submit)
    assert len(encode(msgspec.structs.replace(example, tokens=pack_tokens(range(1_000_000))))) < MAX_FRAME / 10

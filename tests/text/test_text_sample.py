"""Tests of tokens to text: characters and stop strings across tokens, log-probabilities, finish reasons."""

import random
from collections.abc import Sequence

import pytest

from shared.params import SamplingParams
from shared.protocol import FinishReason, TokenLogprobs
from shared.text.detokenizer import Detokenizer
from shared.text.logprobs import prompt_entries
from shared.text.sample_text import SampleText
from shared.text.stop_strings import StopMatcher
from tests.text.vocabulary import KINDS, make_tokenizer, make_vocabulary

TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_ids[0]
FAMILY = "一个 😀 👨‍👩‍👧‍👦 e\u0301 é"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def sample(params: SamplingParams, prompt: Sequence[int] = (200,)) -> SampleText:
    return SampleText(TOKENIZER, params, prompt, stop_token_ids=[EOS, *(params.stop_token_ids or ())])


def run(
    params: SamplingParams, tokens: list[int], finish: FinishReason = FinishReason.LENGTH
) -> tuple[list[str], SampleText]:
    """Return the text that each token shows, and the sample."""
    text = sample(params)
    pieces = []
    for at, token in enumerate(tokens):
        pieces.append(text.feed([token], None, finish if at == len(tokens) - 1 else None))
        if text.finish_reason is not None:
            break
    return pieces, text


def whole(params: SamplingParams, tokens: list[int], finish: FinishReason = FinishReason.LENGTH) -> str:
    """Return the text that shows if all tokens come at once."""
    return sample(params).feed(tokens, None, finish)


# no text


def test_without_detokenize_only_tokens_and_the_end_are_known() -> None:
    logprobs = TokenLogprobs(-0.5, 1, [7, 8], [-0.5, -1.5])
    params = SamplingParams(detokenize=False, logprobs=2, stop_token_ids=[9])
    text = sample(params, prompt=ids("half a 😀")[:-1])
    assert text.feed(ids("hello")[:2], [logprobs] * 2) == ""
    assert text.feed([9], [logprobs], FinishReason.STOP) == ""
    assert (text.text, text.token_ids, text.finish_reason, text.stop_reason) == ("", [*ids("hello")[:2], 9], "stop", 9)
    entries = text.take_logprobs()
    assert [(entry.id, entry.token, entry.bytes, entry.logprob) for entry in entries] == [
        (id, "", b"", -0.5) for id in text.token_ids
    ]
    assert [(other.id, other.token, other.bytes) for other in entries[0].top] == [(7, "", b""), (8, "", b"")]
    prompt = prompt_entries(None, [5, 6], [logprobs])
    assert [(entry.id, entry.token, entry.logprob) for entry in prompt] == [(5, "", None), (6, "", -0.5)]


# characters


def test_no_piece_is_half_a_character() -> None:
    """STR-05."""
    pieces, text = run(SamplingParams(), ids(FAMILY))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text.text == FAMILY == TOKENIZER.decode(ids(FAMILY))


def test_nothing_of_a_prompt_that_ends_inside_a_character_shows() -> None:
    """STR-06."""
    start, rest = ids("Price list: 😀!")[:-5], ids("Price list: 😀!")[-5:]
    for cut in range(4):
        detokenizer = Detokenizer(TOKENIZER, start + rest[:cut])
        pieces = [detokenizer.push(token) for token in rest[cut:]] + [detokenizer.flush()]
        assert "".join(pieces) == "😀!"


def test_a_prompts_unfinished_character_is_not_flushed_alone() -> None:
    """STR-06."""
    detokenizer = Detokenizer(TOKENIZER, ids("Price: 😀")[:-2])
    assert detokenizer.flush() == ""


def test_ids_beyond_the_tokenizer_are_nothing() -> None:
    pieces, _ = run(SamplingParams(), [10**6, *ids("one"), 10**6, *ids(" two")])
    assert pieces == ["", "one", "", " two"]


# stop strings


def test_a_stop_of_several_tokens_does_not_show() -> None:
    """STP-01."""
    pieces, text = run(SamplingParams(stop="three four five"), ids("one two three four five six"))
    assert "".join(pieces) == "one two "
    assert (text.finish_reason, text.stop_reason) == ("stop", "three four five")


def test_a_near_miss_is_delivered_late_but_whole() -> None:
    """STP-01."""
    pieces, text = run(SamplingParams(stop="three four six"), ids("one two three four five"))
    assert pieces == ["one", " two", " ", "", "three four five"]
    assert text.finish_reason == "length"


@pytest.mark.parametrize(("stop", "shown"), [("ewp", "previ"), ("ie", "prev")])
def test_a_stop_inside_and_across_tokens(stop: str, shown: str) -> None:
    """STP-02."""
    tokens = ids("pre") + ids("view") + ids("port")
    pieces, text = run(SamplingParams(stop=stop), tokens)
    assert "".join(pieces) == whole(SamplingParams(stop=stop), tokens) == shown
    assert text.finish_reason == "stop"


@pytest.mark.parametrize(
    ("output", "finish", "shown"),
    [
        ("hi\n\nUs", FinishReason.STOP, "hi\n\nUs"),
        ("hi\n", FinishReason.LENGTH, "hi\n"),
        ("hi\n\nUsX", FinishReason.LENGTH, "hi\n\nUs"),
    ],
)
def test_what_was_held_back_comes_at_the_end(output: str, finish: FinishReason, shown: str) -> None:
    """STP-03."""
    params = SamplingParams(stop=["\n\nUser:", "X"])
    tokens = ids(output) + ([EOS] if finish is FinishReason.STOP else [])
    pieces, text = run(params, tokens, finish)
    assert "".join(pieces) == whole(params, tokens, finish) == shown
    assert text.stop_reason == ("X" if output.endswith("X") else None)


def test_text_that_cannot_begin_a_stop_is_not_held() -> None:
    """STP-05."""
    tokens = ids("The cat sat")
    pieces, _ = run(SamplingParams(stop="z" * 40), tokens)
    assert pieces == [TOKENIZER.decode([token]) for token in tokens]


@pytest.mark.parametrize("stop", ["<|im_end|>", "im", "m_end|> t"])
def test_a_stop_string_is_found_in_a_special_token_that_shows(stop: str) -> None:
    """STP-07."""
    _, text = run(SamplingParams(stop=stop, skip_special_tokens=False), ids("one<|im_end|> two"))
    assert (text.text, text.finish_reason, text.stop_reason) == (
        ("one<|im_end|>" + " two").split(stop)[0],
        "stop",
        stop,
    )


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop", ["<|im_end|>", ["x", "<|im_end|>"], ["<|im_end|>", "one<|"]])
def test_a_special_token_that_does_not_show_is_a_stop_string_by_its_name(stop: str | list[str], include: bool) -> None:
    """STP-07: text that was held back comes before it."""
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    tokens = ids("one<|im_end|> two")
    pieces, text = run(params, tokens)
    assert "".join(pieces) == whole(params, tokens) == "one"
    assert (text.finish_reason, text.stop_reason, text.token_ids) == ("stop", "<|im_end|>", tokens[:2])


def test_the_engines_own_stop_comes_before_a_stop_string_of_the_same_name() -> None:
    """STP-07: an end of sequence has no stop reason."""
    _, text = run(SamplingParams(stop="</s>"), [*ids("one"), EOS], FinishReason.STOP)
    assert (text.text, text.finish_reason, text.stop_reason) == ("one", "stop", None)


@pytest.mark.parametrize("stop", ["im", "m_end|> t", "one six", "<|im_end|", "<|im_end|> "])
@pytest.mark.parametrize("include", [True, False])
def test_a_part_of_a_special_token_that_does_not_show_is_no_stop_string(stop: str, include: bool) -> None:
    """STP-07, TXT-04"""
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    _, text = run(params, ids("one<|im_end|> two"))
    assert (text.text, text.finish_reason, text.stop_reason) == ("one two", "length", None)


def test_a_stop_string_is_found_across_a_special_token_that_does_not_show() -> None:
    """STP-07, TXT-04"""
    _, text = run(SamplingParams(stop="ne tw"), ids("one<|im_end|> two"))
    assert (text.text, text.stop_reason) == ("o", "ne tw")


@pytest.mark.parametrize(
    ("skip", "include", "shown"),
    [
        (True, False, "All done."),
        (False, False, "All done."),
        (False, True, "All done.</s>"),
        (True, True, "All done."),
    ],
)
def test_a_stop_token_shows_only_if_it_is_to_be_included(skip: bool, include: bool, shown: str) -> None:
    """STP-08."""
    params = SamplingParams(stop_token_ids=[EOS], skip_special_tokens=skip, include_stop_str_in_output=include)
    _, text = run(params, [*ids("All done."), EOS], FinishReason.STOP)
    assert (text.text, text.stop_reason) == (shown, EOS)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_token_that_is_no_special_token(skip: bool, include: bool) -> None:
    """TOK-06: it shows only if it is to be included; other added tokens show."""
    tokenizer = make_vocabulary("byte-level").tokenizer
    stop, other = (tokenizer.token_id(name) for name in ("<tool>", "한"))
    assert stop is not None
    assert other is not None
    params = SamplingParams(stop_token_ids=[stop], skip_special_tokens=skip, include_stop_str_in_output=include)
    text = SampleText(tokenizer, params, [200], stop_token_ids=[stop])
    shown = text.feed([*tokenizer.encode("one"), other, stop], None, FinishReason.STOP)
    assert (shown, text.stop_reason) == ("one한" + "<tool>" * include, stop)


def test_an_end_of_sequence_has_no_stop_reason_but_counts_as_a_token() -> None:
    _, text = run(SamplingParams(), [*ids("one"), EOS], FinishReason.STOP)
    assert (text.text, text.finish_reason, text.stop_reason, len(text.token_ids)) == ("one", "stop", None, 2)


def test_stop_strings_wait_for_min_tokens() -> None:
    """SMP-20."""
    params = SamplingParams(stop="two", min_tokens=2)
    _, text = run(params, ids("one two two three"))
    assert text.text == "one two "
    params = SamplingParams(stop="<|im_end|>", min_tokens=2, skip_special_tokens=False)
    _, text = run(params, ids("one<|im_end|> two<|im_end|>"))
    assert text.text == "one<|im_end|> two"


def test_a_stop_string_may_be_shown() -> None:
    _, text = run(SamplingParams(stop="wo", include_stop_str_in_output=True), ids("one two three"))
    assert text.text == "one two"
    params = SamplingParams(stop="<|im_end|>", include_stop_str_in_output=True, skip_special_tokens=False)
    _, text = run(params, ids("one<|im_end|>"))
    assert text.text == "one<|im_end|>"


@pytest.mark.parametrize("tail", [" five", ""])
def test_a_stop_string_in_the_last_allowed_token_is_a_stop(tail: str) -> None:
    """LIM-15."""
    tokens = ids("one two" + tail)
    _, text = run(SamplingParams(stop=tail or "two"), tokens, FinishReason.LENGTH)
    assert text.finish_reason == "stop"


def test_tokens_behind_a_stop_are_not_counted() -> None:
    text = sample(SamplingParams(stop="two"))
    assert text.feed(ids("one two three four")) == "one "
    assert len(text.token_ids) == 2


def test_the_stop_found_does_not_depend_on_how_the_text_is_cut() -> None:
    rng = random.Random(5)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(12))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        cuts = sorted(rng.randrange(len(text)) for _ in range(rng.randint(0, 5)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        results = []
        for parts in ([text], list(text), pieces):
            matcher = StopMatcher(stops)
            shown = ""
            for part in parts:
                shown += matcher.push(part) if matcher.matched is None else ""
            results.append((shown + matcher.flush(), matcher.matched))
        assert results[0] == results[1] == results[2]
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if ends:
            assert results[0][0] + str(results[0][1]) == text[: min(ends)]
        else:
            assert results[0] == (text, None)


def test_a_stop_string_in_held_text_that_did_not_count_does_not_count_later() -> None:
    matcher = StopMatcher(["xab!", "ab"])
    assert matcher.push("xab", can_match=False) == ""
    assert matcher.push("q") == "xabq"
    assert matcher.matched is None


# log-probabilities


def logprobs_of(token: int, logprob: float = -0.5) -> TokenLogprobs:
    return TokenLogprobs(logprob, 1, [token, 5], [logprob, float("-inf")])


def test_entries_have_text_bytes_and_offsets_and_finite_numbers() -> None:
    tokens = ids("one two")
    text = sample(SamplingParams(logprobs=2))
    text.feed(tokens, [logprobs_of(tokens[0]), logprobs_of(tokens[1], float("nan"))], FinishReason.LENGTH)
    entries = text.take_logprobs()
    assert [(entry.token, entry.bytes, entry.offset) for entry in entries] == [("one", b"one", 0), (" two", b" two", 3)]
    assert [entry.logprob for entry in entries] == [-0.5, -9999.0]
    assert [other.logprob for other in entries[0].top] == [-0.5, -9999.0]


def test_entries_come_with_their_text_and_joined_are_the_same_as_at_once() -> None:
    tokens = ids("one two thre 😀 six")
    params = SamplingParams(logprobs=0, stop=["three", "e 😀 six"])
    streamed, at_once = sample(params), sample(params)
    joined = []
    for at, token in enumerate(tokens):
        shown = streamed.feed([token], [logprobs_of(token)], FinishReason.LENGTH if at == len(tokens) - 1 else None)
        entries = streamed.take_logprobs()
        assert shown or not entries or streamed.finish_reason
        joined += entries
    at_once.feed(tokens, [logprobs_of(token) for token in tokens], FinishReason.LENGTH)
    assert joined == at_once.take_logprobs()
    assert len(joined) == len(tokens)
    assert max(entry.offset for entry in joined) <= len(streamed.text)


def test_offsets_are_where_a_tokens_own_text_begins() -> None:
    """TXT-05: behind bytes that are no character, and inside one that the prompt began."""
    first, second = ids("é")
    tokens = [first, *ids("one"), first, first, second, *ids("<|im_end|>"), *ids(" two")]
    text = sample(SamplingParams(logprobs=0))
    text.feed(tokens, [logprobs_of(token) for token in tokens], FinishReason.LENGTH)
    assert text.text == "\ufffdone\ufffdé two"
    offsets = [entry.offset for entry in text.take_logprobs()]
    assert offsets == [0, 1, 4, 5, 5, 6, 6]
    behind = SampleText(TOKENIZER, SamplingParams(logprobs=0), [*ids("one"), first], echo_length=3)
    assert behind.feed([second, *ids(" two")], [logprobs_of(second)] * 2, FinishReason.LENGTH) == "é two"
    assert [entry.offset for entry in behind.take_logprobs()] == [3, 4]


def test_an_echoed_prompt_that_ends_inside_a_character_ends_in_the_replacement_of_it() -> None:
    """TXT-05: the text is that of all tokens, also where no more come."""
    prompt = [*ids("one"), ids("é")[0]]
    for echo_length, text in ((3, "\ufffd"), (None, "")):
        sample_text = SampleText(TOKENIZER, SamplingParams(), prompt, echo_length=echo_length)
        assert sample_text.feed([], None, FinishReason.LENGTH) == text


def test_the_entries_of_a_prompt_spell_its_text() -> None:
    """TXT-05: special tokens and, where SentencePiece begins a text, the missing space included."""
    for kind in KINDS:
        vocabulary = make_vocabulary(kind)
        tokenizer, rng = vocabulary.tokenizer, random.Random(kind)
        whole = [id for id in vocabulary.shown_ids if not tokenizer.token_text(id).startswith("bytes:")]
        for _ in range(50):
            prompt = rng.choices([*whole, *vocabulary.silent_ids], k=6)
            text = tokenizer.decode(prompt, skip_special_tokens=False)
            entries = prompt_entries(tokenizer, prompt, [logprobs_of(token) for token in prompt[1:]])
            if kind != "pieces, stripped":  # there two spaces may go, from two tokens
                assert "".join(entry.token for entry in entries) == text
            assert all(text[entry.offset :].startswith(entry.token) for entry in entries[1:] if entry.offset), kind


def test_a_prompts_first_token_has_no_logprob() -> None:
    prompt = ids("one two three")
    entries = prompt_entries(TOKENIZER, prompt, [logprobs_of(token) for token in prompt[1:]])
    assert [entry.logprob for entry in entries] == [None, -0.5, -0.5]
    assert [entry.offset for entry in entries] == [0, 3, 7]

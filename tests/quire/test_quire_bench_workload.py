"""Tests which requests a benchmark sends and when: the seed, the lengths and the rates determine them."""

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.bench.arrivals import Ramp, arrival_times, milestones, rates
from quire.bench.options import WorkloadOptions
from quire.bench.workload import Request, RequestGenerator, clipped_mean, long_tail_mu
from shared.errors import ConfigError
from shared.text.template import ChatTemplate
from tests.text.vocabulary import make_tokenizer

TOKENIZER = make_tokenizer()


def draw(*, seed: int = 0, text: bool = False, template: ChatTemplate | None = None, **options: Any) -> list[Request]:
    settings = WorkloadOptions(**{"num_prompts": 20} | options)
    return RequestGenerator(settings, TOKENIZER, seed=seed, text=text, template=template).generate()


@pytest.mark.parametrize("dataset", ["random", "prefix_repetition", "long-tail"])
def test_the_same_seed_asks_the_same(dataset: str) -> None:
    assert draw(dataset_name=dataset) == draw(dataset_name=dataset)
    assert draw(dataset_name=dataset) != draw(dataset_name=dataset, seed=1)


def test_random_prompts_have_exactly_their_lengths_and_only_ordinary_tokens() -> None:
    for request in draw(random_input_len=30, random_output_len=7, random_prefix_len=5):
        assert (len(request.prompt), request.prompt_len, request.output_len) == (35, 35, 7)
        assert all(TOKENIZER.special_token(id) is None for id in request.prompt if isinstance(id, int))
    begins = [request.prompt[:5] for request in draw(random_input_len=30, random_prefix_len=5)]
    assert all(begin == begins[0] for begin in begins)
    assert len({tuple(request.prompt[5:]) for request in draw(random_input_len=30, random_prefix_len=5)}) == 20
    assert {(one.prompt_len, one.output_len) for one in draw(input_len=9, output_len=3)} == {(9, 3)}


def test_a_range_ratio_spreads_lengths_evenly() -> None:
    ratio = json.dumps({"input": 0.5, "output": 0.1})
    result = draw(num_prompts=400, random_input_len=10, random_output_len=10, random_range_ratio=ratio)
    assert {request.prompt_len for request in result} == set(range(5, 16))
    assert {request.output_len for request in result} == {9, 10, 11}
    tiny = draw(num_prompts=100, random_input_len=100, random_output_len=1, random_range_ratio="0.9")
    assert {request.output_len for request in tiny} == {1, 2}, "never nothing"


@pytest.mark.parametrize("bos", [False, True])
def test_random_text_is_as_long_when_it_is_tokenized_again(bos: bool) -> None:
    tokenizer = make_tokenizer(bos=bos)
    generator = RequestGenerator(WorkloadOptions(num_prompts=30, random_input_len=30), tokenizer, seed=0, text=True)
    whole = [id for id in generator.ordinary_ids.tolist() if not tokenizer.token_text(id).startswith("bytes:")]
    generator.ordinary_ids = np.array(whole)  # a vocabulary of words has few tokens that are part of a character
    for request in generator.generate():
        assert isinstance(request.prompt, str)
        assert request.prompt_len == len(tokenizer.encode(request.prompt)) == 30, "a BOS included"


def test_prefixes_are_shared_evenly_in_a_shuffled_order() -> None:
    lengths = {
        "prefix_repetition_prefix_len": 6,
        "prefix_repetition_suffix_len": 4,
        "prefix_repetition_num_prefixes": 3,
    }
    result = draw(dataset_name="prefix_repetition", prefix_repetition_output_len=5, **lengths)
    begins = [tuple(request.prompt[:6]) for request in result]
    assert sorted(begins.count(begin) for begin in set(begins)) == [6, 7, 7]
    assert {(request.prompt_len, request.output_len) for request in result} == {(10, 5)}
    ordered = draw(dataset_name="prefix_repetition", disable_shuffle=True, **lengths)
    assert [request.prompt[:6] for request in ordered[:3]] == [request.prompt[:6] for request in ordered[3:6]]
    assert begins[:6] != [tuple(request.prompt[:6]) for request in ordered[:6]]


def test_the_long_tail_has_its_range_mean_and_skew() -> None:
    outputs = [
        request.output_len for request in draw(dataset_name="long-tail", num_prompts=4000, long_tail_input_len=1)
    ]
    assert (min(outputs), max(outputs)) == (8, 474)
    assert statistics.mean(outputs) == pytest.approx(104, rel=0.05)
    assert statistics.median(outputs) < 0.75 * 104
    shorter = draw(dataset_name="long-tail", num_prompts=4000, input_len=1, output_len=40)
    assert statistics.mean(request.output_len for request in shorter) == pytest.approx(40, rel=0.05)


def test_the_mean_of_the_clipped_distribution_is_solved_for() -> None:
    assert clipped_mean(long_tail_mu(104, 8, 474), 8, 474) == pytest.approx(104)
    assert clipped_mean(-50, 8, 474) == pytest.approx(8)
    assert clipped_mean(50, 8, 474) == pytest.approx(474)


def test_a_custom_file_gives_prompts_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('\ufeff{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two", "output_tokens": 4, "more": 1}\n')
    file: dict[str, Any] = {"dataset_name": "custom", "dataset_path": str(path)}
    result = draw(**file, custom_output_len=-1)
    assert len(result) == 20
    assert {(request.prompt, request.output_len) for request in result} == {("one", 3), ("two", 4)}
    once = draw(**file, no_oversample=True, disable_shuffle=True)
    assert [(request.prompt, request.output_len) for request in once] == [("one", 256), ("two", 256)]
    template = ChatTemplate("<{{ messages[0].content }}>")
    chats = draw(**file, no_oversample=True, template=template)
    assert sorted(request.prompt for request in chats if isinstance(request.prompt, str)) == ["<one>", "<two>"]
    assert all(request.prompt_len == len(TOKENIZER.encode(str(request.prompt))) for request in chats)


def test_sharegpt_gives_first_questions_and_the_lengths_of_their_answers(tmp_path: Path) -> None:
    path = tmp_path / "share.json"

    def talk(*turns: str) -> dict[str, Any]:
        return {"id": "x", "conversations": [turn(at, text) for at, text in enumerate(turns)]}

    def turn(at: int, text: str) -> dict[str, str]:
        return {"from": ("human", "gpt")[at % 2], "value": text}

    path.write_text(json.dumps([talk("question one", "answer!"), talk("alone"), talk("ab", "too short"), talk()]))
    file: dict[str, Any] = {"dataset_name": "sharegpt", "dataset_path": str(path), "no_oversample": True}
    length = len(TOKENIZER.encode("answer!"))
    assert [(one.prompt, one.output_len) for one in draw(**file)] == [("question one", length)]
    assert [one.output_len for one in draw(**file, sharegpt_output_len=1)] == [1]


def said(**turns: str | None) -> list[dict[str, Any]]:
    """Return the turns of a conversation by speaker; digits after a name let it speak again."""
    return [{"from": name.rstrip("0123456789"), "value": text} for name, text in turns.items()]


QUESTION = {"human": "question one", "gpt": "answer!"}


@pytest.mark.parametrize(
    "conversation",
    [
        {"conversations": said(**QUESTION)},
        {"conversations": said(system="be brief", **QUESTION)},
        {"conversations": said(system=None, **QUESTION)},
        {"conversations": said(gpt0="hello, what is it?", **QUESTION)},
        {"conversations": said(system="be brief", gpt0="hello, what is it?", **QUESTION, human2="two", gpt2="more")},
        {"conversations": said(human0="not answered", **QUESTION)},
        {"conversations": said(human0=None, gpt0="to nothing", **QUESTION)},
        {"conversations": said(human0="empty answer", gpt0=" ", **QUESTION)},
        {"conversations": said(Human="question one", ChatGPT="answer!")},
        {"conversations": said(one="question one", two="answer!")},
        {"conversations": [{"value": "question one"}, {"value": "answer!"}]},
        {"conversations": [None, 5, *said(**QUESTION)]},
        {"messages": [{"role": "user", "content": "question one"}, {"role": "assistant", "content": "answer!"}]},
        {"conversations": None, "conversation": [{"role": "user", "content": "question one", "value": None},
                                                 {"role": "assistant", "content": "answer!"}]},
        [{"role": "user", "content": "question one"}, {"role": "assistant", "content": "answer!"}],
    ],
)  # fmt: skip
def test_the_first_question_with_an_answer_is_found_in_any_conversation(
    conversation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BEN-01."""
    path = tmp_path / "share.json"
    path.write_text(json.dumps([conversation]))
    (request,) = draw(dataset_name="sharegpt", dataset_path=str(path), no_oversample=True)
    assert (request.prompt, request.output_len) == ("question one", len(TOKENIZER.encode("answer!")))
    assert capsys.readouterr().err == ""


ODD: list[Any] = [
    None, 5, "text", {}, [], {"conversations": None}, {"conversations": "x"}, {"conversations": [None, None]},
    {"conversations": said(human="alone")}, {"conversations": said(system="be brief", human="alone")},
    {"conversations": said(gpt="an answer", human="alone")}, {"conversations": said(human="one", gpt=None)},
    {"conversations": said(human=None, gpt="two")}, {"conversations": [{"from": "human", "value": ["x"]}]},
    {"conversations": said(human="half \ud800", gpt="of a pair")}, {"id": float("nan"), "conversations": []},
]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_odd_entries_are_skipped_and_counted_in_one_line(
    encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BEN-01."""
    path = tmp_path / "share.json"
    path.write_text(json.dumps([*ODD, {"conversations": said(**QUESTION)}]), encoding=encoding)
    (request,) = draw(dataset_name="sharegpt", dataset_path=str(path), no_oversample=True)
    assert request.prompt == "question one"
    line = f"quire: {path}: skipped {len(ODD)} of {len(ODD) + 1} entries, which hold no question with an answer\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not ShareGPT's JSON"),
        ("{", "not ShareGPT's JSON"),
        ("[" * 100_000, "not ShareGPT's JSON"),
        ("{}", "must be a list of conversations"),
        ("[]", "has no prompt that can be used"),
        ("[5]", "has no prompt that can be used"),
    ],
)
def test_a_file_that_is_no_sharegpt_is_refused(tmp_path: Path, content: str, message: str) -> None:
    """BEN-01."""
    (tmp_path / "share.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        draw(dataset_name="sharegpt", dataset_path=str(tmp_path / "share.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_path": "x"}, "--dataset-name random takes no --dataset-path"),
        ({"dataset_name": "custom"}, "--dataset-name custom needs --dataset-path"),
        ({"dataset_name": "sharegpt", "dataset_path": "/no/such"}, "--dataset-path /no/such: No such file"),
        ({"random_range_ratio": "1"}, "--random-range-ratio 1: must be below 1"),
        ({"random_range_ratio": "wide"}, "--random-range-ratio wide: neither a number nor"),
        ({"random_range_ratio": '{"input": 0}'}, "must have exactly the keys input and output"),
        ({"random_input_len": 0}, "must leave at least one token"),
        ({"dataset_name": "prefix_repetition", "num_prompts": 9}, "--num-prompts must be at least"),
        ({"dataset_name": "long-tail", "output_len": 474}, "must lie between"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        draw(**options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": 1}', "line 1: Expected `str`"),
        ("", "has no prompt that can be used"),
        ('{"prompt": "one"}', "needs output_tokens"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "own.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        draw(dataset_name="custom", dataset_path=str(tmp_path / "own.jsonl"), custom_output_len=-1)


def test_all_at_once_a_metronome_and_a_poisson_process() -> None:
    assert arrival_times(rates(3, math.inf), 1.0, 0) == [0.0, 0.0, 0.0]
    assert arrival_times(rates(4, 2.0), math.inf, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    times = arrival_times(rates(2000, 10.0), 1.0, 7)
    assert times == arrival_times(rates(2000, 10.0), 1.0, 7)
    assert times != arrival_times(rates(2000, 10.0), 1.0, 8)
    assert times[-1] == pytest.approx(200.0), "the rate is exact, whatever the seed"
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.1), "as much as the mean"


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    for burstiness in (0.25, 4.0):
        times = arrival_times(rates(4000, 10.0), burstiness, 3)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert statistics.stdev(gaps) == pytest.approx(0.1 / math.sqrt(burstiness), rel=0.15)


def test_a_ramp_goes_from_its_first_rate_to_its_last() -> None:
    assert rates(3, math.inf, Ramp("linear", 0, 4)) == [0.0, 2.0, 4.0]
    assert rates(3, math.inf, Ramp("exponential", 1, 4)) == pytest.approx([1.0, 2.0, 4.0])
    expected = rates(3, math.inf, Ramp("linear", 0, 4))
    times = arrival_times(expected, math.inf, 0)
    assert times == pytest.approx([0.5, 1.0, 1.25]), "a rate of nothing counts as the next"
    reached = milestones(Ramp("linear", 0, 4), expected, times)
    assert [rate for rate, _ in reached] == [0, 1, 2, 3, 4]
    assert [time for _, time in reached] == pytest.approx([0.0, 1.0, 1.0, 1.25, 1.25])

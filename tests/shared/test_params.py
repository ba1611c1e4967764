"""Tests that sampling parameters are refused by name, or become the wire's `Sampling`."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.errors import InvalidRequest
from shared.params import MAX_N, SamplingParams, cache_salt
from shared.protocol import Sampling
from shared.vllm_params import REFUSED, RequestOutputKind


def to_sampling(params: SamplingParams, *, prompt_len: int = 10, max_model_len: int = 100) -> Sampling:
    return params.to_sampling(prompt_len=prompt_len, max_model_len=max_model_len, vocab_size=50, eos_token_ids=[2, 3])


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, MAX_N + 1]),
        ("temperature", [-0.1, 2.1, math.nan, math.inf]),
        ("top_p", [0.0, -0.5, 1.1, math.nan]),
        ("top_k", [-2]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("seed", [2**63, -(2**63) - 1]),
        ("max_tokens", [-1]),
        ("min_tokens", [-1, 17]),  # 17 is more than the default of max_tokens
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("repetition_penalty", [0.0, -1.0, math.inf, math.nan, 1e300, 1e-300, 10**400]),
        ("logprobs", [-1, 21]),
        ("top_logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
        ("stop", ["", ["a", ""], ["a"] * 5, "a" * 1025]),
        ("logit_bias", [{1: 100.5}, {1: -101.0}, {1: math.nan}]),
        ("allowed_token_ids", [[]]),
        ("bad_words", [["a", ""], ["a" * 257], ["a"] * 129]),
        ("truncate_prompt_tokens", [0, -2]),
        ("stream_interval", [0, -1]),
        ("best_of", [2, 0]),
        ("thinking_token_budget", [-2, 2**31]),
    ],
)
def test_values_out_of_range_name_their_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field
        assert caught.value.message.startswith(field)


NO_NUMBER: list[Any] = [
    "5", True, False, b"5", [5], {}, object(), 1j, np.bool_(True), np.array([5, 6]), np.complex64(1)
]  # fmt: skip
WHOLE = (
    "n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs",
    "truncate_prompt_tokens", "stream_interval", "thinking_token_budget",
)  # fmt: skip
FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize", "flat_logprobs")
REAL = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *((field, [*NO_NUMBER, 1.5, math.nan, math.inf]) for field in WHOLE),
        *((field, NO_NUMBER) for field in REAL),
        *((field, [1, 0, "true", None]) for field in FLAGS),
        *((field, [None]) for field in ("n", "top_k", "min_tokens", *REAL)),
        ("stop", [5, ["a", 5], [None], b"a", {"a": 1}.__iter__(), np.array("a")]),
        ("stop_token_ids", [5, np.array(5), "12", ["1"], [1.5], [True], [None], range(1025)]),
        ("allowed_token_ids", [5, np.array(5), "12", ["1"], [1.5], [True], [1, None], range(262_145)]),
        ("logprob_token_ids", [5, np.array(5), "12", ["1"], [1.5], [True], [None], range(129)]),
        ("bad_words", ["a", b"a", 5, [5], ["a", None], {"a": 1}.__iter__()]),
        ("logit_bias", [5, [1], {1: "x"}, {1: None}, {1: True}, {1.5: 1}, {None: 1}, {True: 1},
                        dict.fromkeys(range(16_385), 1)]),
        ("structured_outputs", [{"json_object": True}, "json", 5]),
    ],
)  # fmt: skip
def test_values_of_other_types_name_their_field(field: str, values: list[Any]) -> None:
    """API-01: making the parameters raises the same error as the HTTP API."""
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field
        assert caught.value.message.startswith(field)


def test_whole_numbers_may_be_written_in_other_ways() -> None:
    """API-01: 5.0 (as over HTTP) and numpy's scalars become an int."""
    for field in WHOLE:
        for value in (5.0, np.int64(5), np.uint8(5)):
            kept = getattr(SamplingParams(**{field: value}), field)
            assert (type(kept), kept) == (int, 5)
    allowed = to_sampling(SamplingParams(allowed_token_ids=np.array([8, 3]))).allowed_tokens
    assert allowed == to_sampling(SamplingParams(allowed_token_ids=[8.0, 3])).allowed_tokens == bytes([8, 1])
    params = SamplingParams(
        stop_token_ids=np.array([3, 4]), logit_bias={np.int32(5): np.float32(0.5)}, min_p=np.float32(0)
    )
    sampling = to_sampling(params)
    assert (sampling.stop_token_ids[:2], sampling.logit_bias) == ([3, 4], [(5, 0.5)])
    assert msgspec.msgpack.encode(sampling)


@pytest.mark.parametrize("value", [10**5000, -(10**5000), "x" * 10**7], ids=["large", "small", "long"])
def test_what_is_huge_is_cut_in_the_error(value: Any) -> None:
    """LOOP-03: an error is one line long, even for integers that Python refuses to print."""
    for field in ("n", "min_tokens", "logprobs", "stop", "logit_bias", "ignore_eos"):
        argument = {value: 1} if field == "logit_bias" else value
        with pytest.raises(InvalidRequest) as caught:
            to_sampling(SamplingParams(**{field: argument}))
        assert len(caught.value.message) < 300
    if isinstance(value, int) and value > 0:
        with pytest.raises(InvalidRequest, match="maximum context length"):
            to_sampling(SamplingParams(max_tokens=value))


@pytest.mark.parametrize("key", ["abc", "-1", "50", "1.0", " 1", "", "9" * 30, -1, 50])
def test_a_key_of_the_bias_that_is_no_token_is_named_with_the_range(key: Any) -> None:
    """HTTP-09: the error names the key and the range."""
    with pytest.raises(InvalidRequest, match="logit_bias must hold token ids from 0 to 49") as caught:
        to_sampling(SamplingParams(logit_bias={"1": 1, key: 1}))
    assert repr(key) in caught.value.message


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [1, MAX_N]),
        ("temperature", [0.0, 2.0]),
        ("top_p", [1e-9, 1.0]),
        ("top_k", [-1, 0, 1, 10**9]),
        ("min_p", [0.0, 1.0]),
        ("seed", [None, -1, 0, 2**63 - 1, -(2**63)]),
        ("max_tokens", [None, 0, 1]),
        ("min_tokens", [0, 16]),
        ("presence_penalty", [-2.0, 2.0]),
        ("repetition_penalty", [1e-30, 1e-3, 5.0, 1e30]),
        ("logprobs", [None, 0, 20]),
        ("stop", [None, "a", ["a", "b", "c", "d"], []]),
        ("logit_bias", [None, {}, {1: -100.0, 2: 100.0}]),
        ("allowed_token_ids", [None, [0], [49, 3, 3], range(50)]),
        ("bad_words", [None, [], ["a" * 256] * 128, (" ", "\n")]),
    ],
)
def test_values_in_range_are_taken(field: str, values: list[Any]) -> None:
    for value in values:
        params = SamplingParams(**{field: value})
        assert getattr(params, field) == value
        sampling = to_sampling(params)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling) == sampling, (
            "the wire takes it too"
        )


@pytest.mark.parametrize("top_k", [-1, 0, 50, 10**9])
def test_a_top_k_that_leaves_all_tokens_is_off(top_k: int) -> None:
    """SMP-06: the engine's word for that is 0."""
    assert to_sampling(SamplingParams(top_k=top_k)).top_k == to_sampling(SamplingParams()).top_k == 0


def test_to_sampling_carries_every_field() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=7,
        stop_token_ids=[9, 4, 9],
        max_tokens=8,
        min_tokens=3,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias={6: 1.0, 5: -1.0},
        logprobs=2,
        prompt_logprobs=1,
    )
    assert to_sampling(params) == Sampling(
        max_tokens=8,
        seed=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias=[(5, -1.0), (6, 1.0)],
        min_tokens=3,
        stop_token_ids=[9, 4, 2, 3],
        logprobs=2,
        prompt_logprobs=1,
    )


@pytest.mark.parametrize("field", REAL)
def test_every_number_of_numpys_can_be_sent(field: str) -> None:
    """A float64 of numpy is a float to Python, but not to the wire's encoder."""
    sampling = to_sampling(SamplingParams(**{field: np.float64(0.5)}))  # type: ignore[arg-type]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling) == sampling


@pytest.mark.parametrize("penalty", [1e-30, 1e30])
def test_what_is_in_range_passes_the_wire(penalty: float) -> None:
    sampling = to_sampling(SamplingParams(repetition_penalty=penalty))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling) == sampling


def test_what_is_off_is_off_on_the_wire() -> None:
    sampling = to_sampling(SamplingParams(top_k=-1, seed=0))
    assert sampling == Sampling(max_tokens=16, seed=0, stop_token_ids=[2, 3])


def test_end_of_sequence_can_be_ignored_but_asked_for() -> None:
    assert to_sampling(SamplingParams(ignore_eos=True)).stop_token_ids == []
    assert to_sampling(SamplingParams(ignore_eos=True, stop_token_ids=[2])).stop_token_ids == [2]


@pytest.mark.parametrize(("seed", "wire"), [(5, 5), (-2, 2**64 - 2), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1)])
def test_seeds_are_64_bits(seed: int, wire: int) -> None:
    assert to_sampling(SamplingParams(seed=seed)).seed == wire


@pytest.mark.parametrize("seed", [None, -1])
def test_the_unseeded_get_seeds_of_their_own(seed: int | None) -> None:
    params = SamplingParams(seed=seed)
    seeds = {to_sampling(params).seed for _ in range(10)}
    assert len(seeds) == 10
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("logprobs", "top_logprobs", "wire"), [(None, None, -1), (0, None, 0), (None, 3, 3), (2, 5, 5), (5, 2, 5)]
)
def test_the_larger_of_both_names_counts(logprobs: int | None, top_logprobs: int | None, wire: int) -> None:
    assert to_sampling(SamplingParams(logprobs=logprobs, top_logprobs=top_logprobs)).logprobs == wire


def test_named_tokens_stand_in_place_of_the_likeliest() -> None:
    for fields in ({}, {"logprobs": 5}, {"top_logprobs": 0}):
        sampling = to_sampling(SamplingParams(logprob_token_ids=np.array([7, 3, 7]), **fields))
        assert (sampling.logprobs, sampling.logprob_token_ids, sampling.num_alternatives) == (0, [7, 3], 2)
    sampling = to_sampling(SamplingParams(logprobs=5, logprob_token_ids=[]))
    assert (sampling.logprobs, sampling.logprob_token_ids, sampling.num_alternatives) == (5, [], 5)
    assert to_sampling(SamplingParams()).num_alternatives == -1


def test_the_rest_of_the_context_is_the_limit_if_none_is_given() -> None:
    assert to_sampling(SamplingParams(max_tokens=None)).max_tokens == 90
    assert to_sampling(SamplingParams(max_tokens=90)).max_tokens == 90
    assert to_sampling(SamplingParams(max_tokens=0), prompt_len=100).max_tokens == 0


@pytest.mark.parametrize(
    ("max_tokens", "prompt_len", "param"),
    [(91, 10, "max_tokens"), (1, 100, "prompt"), (None, 100, "prompt"), (None, 1000, "prompt"), (0, 101, "prompt")],
)
def test_what_is_longer_than_the_context_is_refused(max_tokens: int | None, prompt_len: int, param: str) -> None:
    with pytest.raises(InvalidRequest, match="maximum context length is 100 tokens") as caught:
        to_sampling(SamplingParams(max_tokens=max_tokens), prompt_len=prompt_len)
    assert caught.value.param == param


@pytest.mark.parametrize("token", [-1, 50, 10**12])
def test_token_ids_beyond_the_vocabulary_are_refused(token: int) -> None:
    for params in (SamplingParams(stop_token_ids=[1, token]), SamplingParams(logit_bias={token: 1.0})):
        with pytest.raises(InvalidRequest, match=r"must hold token ids from 0 to 49 \(a vocabulary of 50\)"):
            to_sampling(params)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="use_beam_search"):
        msgspec.convert({"use_beam_search": True}, SamplingParams)
    with pytest.raises(TypeError, match="use_beam_search"):
        SamplingParams(use_beam_search=True)  # type: ignore[call-arg]


VLLM_DEFAULTS: dict[str, Any] = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None, "stop_token_ids": None, "ignore_eos": False,
    "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None, "logprob_token_ids": None, "flat_logprobs": False, "detokenize": True,
    "skip_special_tokens": True, "include_stop_str_in_output": False, "output_kind": RequestOutputKind.CUMULATIVE,
    "stream_interval": None, "skip_clone": False, "structured_outputs": None, "logit_bias": None, "extra_args": None,
    "skip_reading_prefix_cache": None, "thinking_token_budget": None, "watermarking": None,
    "routed_experts_prompt_start": 0, "trace_decode_token_ids": None,
}  # fmt: skip
"""The fields of `SamplingParams` in vLLM 0.32."""


def test_the_defaults_of_vllm_are_those_of_quire() -> None:
    """API-02: whoever writes them out gets what they get without them."""
    params = SamplingParams(**VLLM_DEFAULTS)
    assert msgspec.structs.replace(params, output_kind=None, routed_experts_prompt_start=None) == SamplingParams()
    assert SamplingParams.from_optional(**VLLM_DEFAULTS) == params
    assert SamplingParams.from_optional(**dict.fromkeys(VLLM_DEFAULTS)) == SamplingParams(max_tokens=None)


@pytest.mark.parametrize("field", REFUSED)
def test_what_vllm_has_and_quire_lacks_is_refused_by_name(field: str) -> None:
    """API-02: with the reason, unless it asks for nothing."""
    neutral_values, reason = REFUSED[field]
    for neutral in (None, [], {}, *neutral_values):
        SamplingParams(**{field: neutral})
    values: list[Any] = [[1], {"a": 1}, 7, True, object()]
    for value in values:
        with pytest.raises(InvalidRequest, match=f"^{field} is not supported: ") as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field
        assert reason in caught.value.message


def test_an_unknown_kind_of_output_is_refused() -> None:
    values: list[Any] = [1, "delta"]
    for value in values:
        with pytest.raises(InvalidRequest, match="output_kind must be a RequestOutputKind"):
            SamplingParams(output_kind=value)


def test_fields_may_be_changed_and_are_checked_in_a_copy() -> None:
    """API-02: vLLM's examples set max_tokens of the default parameters."""
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0})
    copy = params.clone()
    params.max_tokens, params.temperature = 5, 0.5
    assert isinstance(params.stop, list)
    params.stop.append("b")
    assert params.clone() == SamplingParams(stop=["a", "b"], logit_bias={1: 1.0}, max_tokens=5, temperature=0.5)
    assert copy == SamplingParams(stop=["a"], logit_bias={1: 1.0})
    params.top_p = 2.0
    with pytest.raises(InvalidRequest, match="top_p must be greater than 0"):
        params.clone()


def test_stop_strings_need_text() -> None:
    for stop in ("a", ["a"]):
        with pytest.raises(InvalidRequest, match="stop needs detokenize to be true"):
            SamplingParams(stop=stop, detokenize=False)
    assert SamplingParams(stop=[], detokenize=False, stop_token_ids=[1]).stop_strings == ()


def test_the_number_of_candidates_can_only_be_that_of_outputs() -> None:
    assert SamplingParams(n=3, best_of=3).n == 3
    with pytest.raises(InvalidRequest, match="best_of is supported only if it equals n, which is 1, got 3"):
        SamplingParams(best_of=3)


def test_stop_strings_are_a_tuple_either_way() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    assert [to_sampling(SamplingParams(top_k=top_k)).top_k for top_k in (5, 10**30)] == [5, 0]


def test_min_tokens_must_fit_the_room_that_no_max_tokens_leaves() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens must be at most"):
        to_sampling(SamplingParams(max_tokens=None, min_tokens=2**63))


@pytest.mark.parametrize(("default", "prompt_len", "max_tokens"), [(5, 10, 5), (5, 97, 3), (None, 97, 3), (5, 99, 1)])
def test_a_default_limit_gives_way_to_the_room_that_the_prompt_leaves(
    default: int | None, prompt_len: int, max_tokens: int
) -> None:
    limits: dict[str, Any] = {"max_model_len": 100, "vocab_size": 50, "eos_token_ids": []}
    params = SamplingParams(max_tokens=None)
    assert params.to_sampling(prompt_len=prompt_len, default_max_tokens=default, **limits).max_tokens == max_tokens
    requested = SamplingParams(max_tokens=2)
    assert requested.to_sampling(prompt_len=10, default_max_tokens=default, **limits).max_tokens == 2
    with pytest.raises(InvalidRequest, match="min_tokens must be at most max_tokens, which is 5"):
        SamplingParams(max_tokens=None, min_tokens=6).to_sampling(prompt_len=10, default_max_tokens=5, **limits)


@pytest.mark.parametrize("ids", [[50], [-1], [3, 2**70], [3, -(2**70)]])
def test_allowed_tokens_beyond_the_vocabulary_are_named_with_the_range(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="allowed_token_ids must hold token ids from 0 to 49") as caught:
        to_sampling(SamplingParams(allowed_token_ids=ids))
    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    ("fields", "bad_words", "param"),
    [
        ({"allowed_token_ids": [5, 6]}, [[5], [6]], "bad_words"),
        ({"allowed_token_ids": [2, 3], "min_tokens": 1}, [], "min_tokens"),
        ({"allowed_token_ids": [2, 5], "min_tokens": 1}, [[5]], "min_tokens"),
        ({"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 1}, [], "min_tokens"),
    ],
)
def test_parameters_that_leave_no_token_are_refused(
    fields: dict[str, Any], bad_words: list[list[int]], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _with_bad_words(SamplingParams(**fields), bad_words)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "bad_words"),
    [
        ({"allowed_token_ids": [5, 6]}, [[5], [6, 5]]),
        ({"allowed_token_ids": [2]}, []),
        ({"allowed_token_ids": [2], "min_tokens": 1, "ignore_eos": True}, []),
        ({"min_tokens": 1}, [[5], [6]]),
    ],
)
def test_parameters_that_leave_a_token_are_taken(fields: dict[str, Any], bad_words: list[list[int]]) -> None:
    assert _with_bad_words(SamplingParams(**fields), bad_words).bad_words == bad_words


def _with_bad_words(params: SamplingParams, bad_words: list[list[int]]) -> Sampling:
    return params.to_sampling(
        prompt_len=10, max_model_len=100, vocab_size=50, eos_token_ids=[2, 3], bad_words=bad_words
    )


def test_a_cache_salt_is_a_short_text() -> None:
    assert (cache_salt(None), cache_salt("x"), cache_salt("ä" * 128)) == ("", "x", "ä" * 128)
    for value in ("", "x" * 129, 5, b"x", ["x"], True):
        with pytest.raises(InvalidRequest, match="cache_salt must be a text of 1 to 128 characters") as caught:
            cache_salt(value)
        assert caught.value.param == "cache_salt"

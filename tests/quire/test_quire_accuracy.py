"""Tests how near the embedded model's answers by default, in the bits of its file, are to those in float32."""

from quire import LLM, SamplingParams

QUESTIONS = [
    "What is the capital of Japan?",  # README's
    "What is the capital of Germany?",
    "How many days are in a week?",
]
"""Whose answers have no near tie: at each token, the likeliest leads by more than the default's rounding changes."""

LARGEST_ERROR = 0.4  # of the log-probability of one of the likeliest tokens; see benchmarks/results/accuracy.md


def answers(dtype: str) -> tuple[list[str], list[dict[int, float]]]:
    """Return the answers, and log-probabilities of the likeliest first tokens of each."""
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5)
    outputs = LLM(dtype=dtype).chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    firsts = [output.outputs[0].logprobs for output in outputs]
    return (
        [output.outputs[0].text for output in outputs],
        [{token: entry.logprob for token, entry in first[0].items()} for first in firsts if first],
    )


def test_answers_by_default_are_those_of_float32() -> None:
    texts, logprobs = answers("auto")
    exact_texts, exact_logprobs = answers("float32")
    assert texts == exact_texts
    assert texts[0] == "The capital of Japan is Tokyo."
    for rounded, exact in zip(logprobs, exact_logprobs, strict=True):
        common = rounded.keys() & exact.keys()
        assert len(common) >= 3
        assert max(abs(rounded[token] - exact[token]) for token in common) < LARGEST_ERROR

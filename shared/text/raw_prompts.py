"""Finds prompts that probably lack the chat template: a chat model that gets a bare question may end at once.

It takes the question for a whole turn, and says that the turn is over. So the answer is empty, and there is no error.
"""

from collections.abc import Sequence

from shared.protocol import FinishReason, Sampling
from shared.text.sample_text import SampleText
from shared.text.tokenizer import Tokenizer


def ended_at_once(
    prompt: Sequence[int], samples: Sequence[SampleText], sampling: Sampling, tokenizer: Tokenizer
) -> bool:
    """Return whether each sample is an end-of-sequence token alone, which the model chose to write.

    It is false if the prompt has special tokens behind the first one: then its user has written the template's markers.
    """
    was_free = not (sampling.grammar or sampling.allowed_tokens or sampling.logit_bias or sampling.bad_words)
    return was_free and all(map(_is_only_an_end, samples)) and tokenizer.special_ids.isdisjoint(prompt[1:])


def _is_only_an_end(sample: SampleText) -> bool:
    return (
        sample.finish_reason == FinishReason.STOP.value
        and sample.stop_reason is None  # an end-of-sequence token; the request's own stops have a reason
        and len(sample.token_ids) == 1
    )

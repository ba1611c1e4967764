"""Makes the requests of a benchmark: prompts and output lengths, from a seed.

Random prompts are token ids drawn evenly from the tokens that are not special, so that their lengths are exact and no
prompt is cached by chance. If the API accepts only text, the ids are decoded to a text with the same number of tokens.
If no such text is found, `prompt_len` is the number of tokens that the text has.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from quire.bench.files import Entry, custom, sharegpt
from quire.bench.options import WorkloadOptions
from quire.bench.values import range_ratios
from shared.errors import ConfigError
from shared.text.template import ChatTemplate
from shared.text.tokenizer import Tokenizer

MAX_TRIES = 10
"""Attempts to find a text with the right number of tokens."""

SIGMA = 1.0
"""Standard deviation of the log of `long-tail` output lengths. A tenth of the outputs exceeds 3.6 times the median."""

SHAREGPT_LIMITS = (4, 1024, 2048)
"""Minimum of prompt and of answer, maximum of the prompt, maximum of both together, in tokens, as in `vllm bench`."""

RANDOM_DATASETS = frozenset({"random", "prefix_repetition", "long-tail"})

T = TypeVar("T")


class Request(NamedTuple):
    """A request: a prompt (text or token ids), its length in tokens, and the number of tokens to generate."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int


class RequestGenerator:
    """Generates requests. `text` makes random prompts text; `template` makes a custom file's prompts chats."""

    def __init__(
        self,
        options: WorkloadOptions,
        tokenizer: Tokenizer,
        *,
        seed: int,
        text: bool = False,
        template: ChatTemplate | None = None,
    ) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.rng = np.random.default_rng(seed)
        self.text = text
        self.template = template
        ordinary = (id for id in range(tokenizer.vocab_size) if tokenizer.special_token(id) is None)
        self.ordinary_ids = np.fromiter(ordinary, dtype=np.int64)

    def generate(self) -> list[Request]:
        """Return the requests that the options ask for. Raise `ConfigError`."""
        if self.options.dataset_name in RANDOM_DATASETS and self.options.dataset_path is not None:
            raise ConfigError(f"--dataset-name {self.options.dataset_name} takes no --dataset-path")
        match self.options.dataset_name:
            case "random":
                return self._random()
            case "prefix_repetition":
                return self._prefixes()
            case "long-tail":
                return self._long_tail()
            case "sharegpt":
                return self._fill(self._sharegpt(sharegpt(self.options.dataset_path)))
            case "custom":
                return self._fill(self._custom(list(custom(self.options.dataset_path))))

    def _random(self) -> list[Request]:
        options = self.options
        input_len = options.input_len or options.random_input_len
        input_ratio, output_ratio = range_ratios(options)
        if options.random_prefix_len + math.floor(input_len * (1 - input_ratio)) < 1:
            raise ConfigError("--random-input-len and --random-prefix-len must leave at least one token")
        prefix = self._ids(options.random_prefix_len)
        inputs = self._lengths(input_len, input_ratio, 0)
        outputs = self._lengths(options.output_len or options.random_output_len, output_ratio, 1)
        return [
            self._request(prefix + self._ids(length), output) for length, output in zip(inputs, outputs, strict=True)
        ]

    def _prefixes(self) -> list[Request]:
        options, count = self.options, self.options.num_prompts
        if count < options.prefix_repetition_num_prefixes:
            raise ConfigError("--num-prompts must be at least --prefix-repetition-num-prefixes")
        prefixes = [
            self._ids(options.prefix_repetition_prefix_len) for _ in range(options.prefix_repetition_num_prefixes)
        ]
        output = options.output_len or options.prefix_repetition_output_len
        length = options.prefix_repetition_suffix_len
        requests = [
            self._request(prefixes[index % len(prefixes)] + self._ids(length), output) for index in range(count)
        ]
        return self._shuffled(requests)

    def _long_tail(self) -> list[Request]:
        options = self.options
        minimum, maximum = options.long_tail_output_min, options.long_tail_output_max
        mean = float(options.output_len or options.long_tail_output_mean)
        if not minimum < mean < maximum:
            raise ConfigError("the mean of --dataset-name long-tail must lie between its least and its greatest length")
        lengths = self.rng.lognormal(long_tail_mu(mean, minimum, maximum), SIGMA, options.num_prompts)
        outputs = np.clip(np.rint(lengths), minimum, maximum).astype(int).tolist()
        length = options.input_len or options.long_tail_input_len
        return [self._request(self._ids(length), output) for output in outputs]

    def _sharegpt(self, entries: Sequence[Entry]) -> list[Request]:
        output_len = self.options.output_len or self.options.sharegpt_output_len
        minimum, max_prompt, max_total = SHAREGPT_LIMITS
        requests: list[Request] = []
        for entry in self._shuffled(entries):
            if len(requests) == self.options.num_prompts:
                break
            prompt_len = len(self.tokenizer.encode(entry.prompt))
            output = output_len or len(self.tokenizer.encode(entry.answer or ""))
            fits = minimum <= prompt_len <= max_prompt and prompt_len + output <= max_total
            if fits and (output >= minimum or output_len):
                requests.append(Request(entry.prompt, prompt_len, output))
        return requests

    def _custom(self, entries: Sequence[Entry]) -> list[Request]:
        output_len = self.options.output_len or self.options.custom_output_len
        requests: list[Request] = []
        for entry in self._shuffled(entries)[: self.options.num_prompts]:
            output = entry.output_tokens if output_len == -1 else output_len
            if not output or output < 1:
                raise ConfigError("--custom-output-len -1 needs output_tokens, at least 1, in every line of the file")
            prompt = entry.prompt
            if self.template is not None:
                prompt = self.template.render([{"role": "user", "content": prompt}])
            requests.append(Request(prompt, len(self.tokenizer.encode(prompt)), output))
        return requests

    def _fill(self, requests: list[Request]) -> list[Request]:
        """Repeat requests at random until there are `num_prompts`. Raise `ConfigError` if there are none."""
        if not requests:
            raise ConfigError(f"--dataset-path {self.options.dataset_path} has no prompt that can be used")
        missing = self.options.num_prompts - len(requests)
        if missing > 0 and not self.options.no_oversample:
            requests += [requests[index] for index in self.rng.integers(0, len(requests), missing).tolist()]
        return requests

    def _lengths(self, mean: int, ratio: float, minimum: int) -> list[int]:
        low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
        lengths = self.rng.integers(max(low, minimum), max(high, minimum) + 1, self.options.num_prompts)
        return [int(length) for length in lengths]

    def _ids(self, count: int) -> list[int]:
        return [int(id) for id in self.ordinary_ids[self.rng.integers(0, len(self.ordinary_ids), count)]]

    def _request(self, ids: list[int], output: int) -> Request:
        if not self.text:
            return Request(ids, len(ids), output)
        num_added = len(self.tokenizer.encode(""))  # such as a BOS, which the server puts before the text
        ids = ids[: max(len(ids) - num_added, 1)]
        length = len(ids)
        text = self.tokenizer.decode(ids)
        for spare in range(MAX_TRIES):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == length:
                break
            kept = ids[: max(length - spare, 0)]  # cutting inside a character may add tokens, so each try cuts one more
            text = self.tokenizer.decode(kept + self._ids(length - len(kept)))
        return Request(text, len(self.tokenizer.encode(text)), output)

    def _shuffled(self, items: Sequence[T]) -> list[T]:
        if self.options.disable_shuffle:
            return list(items)
        return [items[index] for index in self.rng.permutation(len(items)).tolist()]


def long_tail_mu(mean: float, minimum: int, maximum: int) -> float:
    """Return the mu with which a log-normal of `SIGMA`, clipped to `minimum` and `maximum`, has this mean."""
    low, high = math.log(minimum), math.log(maximum)
    for _ in range(60):
        middle = (low + high) / 2
        if clipped_mean(middle, minimum, maximum) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def clipped_mean(mu: float, minimum: int, maximum: int) -> float:
    """Return the mean of exp(Normal(mu, SIGMA)) clipped to `minimum` and `maximum`."""

    def share_below(value: float) -> float:
        return (1 + math.erf((math.log(value) - mu) / (SIGMA * math.sqrt(2)))) / 2

    def weighted_share_below(value: float) -> float:  # weighted by the value
        return (1 + math.erf((math.log(value) - mu - SIGMA**2) / (SIGMA * math.sqrt(2)))) / 2

    inside = math.exp(mu + SIGMA**2 / 2) * (weighted_share_below(maximum) - weighted_share_below(minimum))
    return minimum * share_below(minimum) + inside + maximum * (1 - share_below(maximum))

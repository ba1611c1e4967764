"""Makes the requests of a benchmark: prompts and output lengths, from a seed.

Random prompts are token ids drawn evenly from the ordinary tokens, so that their lengths are exact and no prompt is
cached by chance. Where the API takes only text, the ids become a text that has as many tokens when it is tokenized
again; if no such text is found, `prompt_len` is the number that it has.
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

TRIES = 10
"""Attempts to find a text with the right number of tokens."""

SIGMA = 1.0
"""Standard deviation of the log of `long-tail` output lengths: a tenth of the answers exceeds 3.6 medians."""

SHAREGPT_LIMITS = (4, 1024, 2048)
"""Fewest tokens of prompt or answer, most of a prompt, most of both; ShareGPT benchmarks skip the rest."""

T = TypeVar("T")

RANDOM = frozenset({"random", "prefix_repetition", "long-tail"})


class Request(NamedTuple):
    """A request: a prompt (text or token ids), its length in tokens, and the number of tokens to generate."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int


class RequestGenerator:
    """Generates requests. `text` makes random prompts text; `template`, if given, makes a file's prompts chats."""

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
        special = (id for id in range(tokenizer.vocab_size) if tokenizer.special_token(id) is None)
        self.ordinary = np.fromiter(special, dtype=np.int64)

    def generate(self) -> list[Request]:
        """Return the requests that the options ask for. Raise `ConfigError`."""
        if self.options.dataset_name in RANDOM and self.options.dataset_path is not None:
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
        own = options.input_len or options.random_input_len
        least, ratios = options.random_prefix_len, range_ratios(options)
        if least + math.floor(own * (1 - ratios[0])) < 1:
            raise ConfigError("--random-input-len and --random-prefix-len must leave at least one token")
        prefix = self._ids(options.random_prefix_len)
        inputs = self._lengths(own, ratios[0], 0)
        outputs = self._lengths(options.output_len or options.random_output_len, ratios[1], 1)
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
        requests = [self._request(prefixes[at % len(prefixes)] + self._ids(length), output) for at in range(count)]
        return self._shuffled(requests)

    def _long_tail(self) -> list[Request]:
        options = self.options
        least, most = options.long_tail_output_min, options.long_tail_output_max
        mean = float(options.output_len or options.long_tail_output_mean)
        if not least < mean < most:
            raise ConfigError("the mean of --dataset-name long-tail must lie between its least and its greatest length")
        lengths = self.rng.lognormal(long_tail_mu(mean, least, most), SIGMA, options.num_prompts)
        outputs = np.clip(np.rint(lengths), least, most).astype(int).tolist()
        length = options.input_len or options.long_tail_input_len
        return [self._request(self._ids(length), output) for output in outputs]

    def _sharegpt(self, entries: Sequence[Entry]) -> list[Request]:
        output_len = self.options.output_len or self.options.sharegpt_output_len
        least, most, most_together = SHAREGPT_LIMITS
        requests: list[Request] = []
        for entry in self._shuffled(entries):
            if len(requests) == self.options.num_prompts:
                break
            prompt = len(self.tokenizer.encode(entry.prompt))
            output = output_len or len(self.tokenizer.encode(entry.answer or ""))
            fits = least <= prompt <= most and prompt + output <= most_together
            if fits and (output >= least or output_len):
                requests.append(Request(entry.prompt, prompt, output))
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
        """Repeat random ones until there are as many as the options ask for."""
        if not requests:
            raise ConfigError(f"--dataset-path {self.options.dataset_path} has no prompt that can be used")
        missing = self.options.num_prompts - len(requests)
        if missing > 0 and not self.options.no_oversample:
            requests += [requests[at] for at in self.rng.integers(0, len(requests), missing).tolist()]
        return requests

    def _lengths(self, middle: int, ratio: float, least: int) -> list[int]:
        low, high = math.floor(middle * (1 - ratio)), math.ceil(middle * (1 + ratio))
        lengths = self.rng.integers(max(low, least), max(high, least) + 1, self.options.num_prompts)
        return [int(length) for length in lengths]

    def _ids(self, count: int) -> list[int]:
        return [int(id) for id in self.ordinary[self.rng.integers(0, len(self.ordinary), count)]]

    def _request(self, ids: list[int], output: int) -> Request:
        if not self.text:
            return Request(ids, len(ids), output)
        added = len(self.tokenizer.encode(""))  # such as a BOS, which the server will put before the text
        ids = ids[: max(len(ids) - added, 1)]
        length = len(ids)
        text = self.tokenizer.decode(ids)
        for spare in range(TRIES):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == length:
                break
            kept = ids[: max(length - spare, 0)]  # a cut may split a character, which then grows again
            text = self.tokenizer.decode(kept + self._ids(length - len(kept)))
        return Request(text, len(self.tokenizer.encode(text)), output)

    def _shuffled(self, items: Sequence[T]) -> list[T]:
        if self.options.disable_shuffle:
            return list(items)
        return [items[at] for at in self.rng.permutation(len(items)).tolist()]


def long_tail_mu(mean: float, least: int, most: int) -> float:
    """Return the mu of a log-normal of `SIGMA` that has this mean once it is clipped to `least` to `most`."""
    low, high = math.log(least), math.log(most)
    for _ in range(60):
        middle = (low + high) / 2
        if clipped_mean(middle, least, most) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def clipped_mean(mu: float, least: int, most: int) -> float:
    """Return the mean of exp(Normal(mu, SIGMA)) clipped to `least` to `most`."""

    def below(value: float) -> float:
        return (1 + math.erf((math.log(value) - mu) / (SIGMA * math.sqrt(2)))) / 2

    def below_weighted(value: float) -> float:  # of the density times the value
        return (1 + math.erf((math.log(value) - mu - SIGMA**2) / (SIGMA * math.sqrt(2)))) / 2

    inside = math.exp(mu + SIGMA**2 / 2) * (below_weighted(most) - below_weighted(least))
    return least * below(least) + inside + most * (1 - below(most))

"""The parameters of a beam search, and their bounds."""

from msgspec import Struct
from msgspec.structs import force_setattr

from shared.errors import InvalidRequest, brief
from shared.params import MAX_CANDIDATES, SamplingParams, real, whole
from shared.protocol import Sampling
from shared.structured_outputs import StructuredOutputsParams

MAX_BEAM_WIDTH = 32

MAX_BEAM_TOKENS = 262_144
"""Beams times tokens of a sequence: as many may be sent to the engine in each step, which looks at each of them."""

MAX_LENGTH_PENALTY = 10.0

REFUSED = "is not supported in a beam search"


class BeamSettings(Struct, frozen=True):
    """How many beams there are, and how their scores depend on their lengths."""

    width: int
    length_penalty: float = 1.0

    @classmethod
    def checked(cls, name: str, width: object, length_penalty: object = None) -> "BeamSettings":
        """Return the settings. Raise `InvalidRequest` for wrong ones; `name` is that of the field for the width."""
        settings = cls(whole(name, width), 1.0 if length_penalty is None else real("length_penalty", length_penalty))
        if not 1 <= settings.width <= MAX_BEAM_WIDTH:
            rule = f"must be between 1 and {MAX_BEAM_WIDTH} in a beam search"
            raise InvalidRequest(f"{name} {rule}, got {brief(settings.width)}", name)
        if not -MAX_LENGTH_PENALTY <= settings.length_penalty <= MAX_LENGTH_PENALTY:
            rule = f"must be between {-MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}"
            raise InvalidRequest(f"length_penalty {rule}, got {brief(settings.length_penalty)}", "length_penalty")
        return settings

    def num_candidates(self, sampling: Sampling) -> int:
        """Return how many likely next tokens of a beam matter: `width` that are no stop tokens, and those."""
        return self.width + len(sampling.stop_token_ids)

    def check(self, prompt_len: int, sampling: Sampling, vocab_size: int) -> None:
        """Raise `InvalidRequest` if such a search cannot be done, or would take too much of the engine."""
        max_tokens = sampling.max_tokens
        if sampling.grammar:
            raise InvalidRequest(
                "structured output, and calls that are demanded or strict, are not supported in a beam search",
                "use_beam_search",
            )
        if max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1 in a beam search, got {max_tokens}", "max_tokens")
        if (num_tokens := self.width * (prompt_len + max_tokens)) > MAX_BEAM_TOKENS:
            raise InvalidRequest(
                f"{self.width} beams of {prompt_len} tokens of prompt and {max_tokens} of output (max_tokens) are "
                f"{num_tokens} tokens, but a beam search may have at most {MAX_BEAM_TOKENS}",
                "max_tokens",
            )
        if (count := self.num_candidates(sampling)) > (limit := min(MAX_CANDIDATES, vocab_size)):
            raise InvalidRequest(
                f"beams and stop tokens together must be at most {limit} in a beam search, got {count}",
                "stop_token_ids",
            )


class BeamSearchParams(Struct, frozen=True):
    """The parameters of `LLM.beam_search`, with vLLM's names. Raise `InvalidRequest` for a wrong one.

    The temperature has no effect on the log-probabilities by which beams are compared: it must be 0 or 1.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        force_setattr(self, "beam_width", settings.width)
        force_setattr(self, "length_penalty", settings.length_penalty)
        force_setattr(self, "max_tokens", whole("max_tokens", self.max_tokens))
        _ = self.sampling_params  # which checks the rest
        check_temperature(self.temperature)
        if self.structured_outputs is not None:
            raise InvalidRequest(f"structured_outputs {REFUSED}", "structured_outputs")

    @property
    def settings(self) -> BeamSettings:
        return BeamSettings.checked("beam_width", self.beam_width, self.length_penalty)

    @property
    def sampling_params(self) -> SamplingParams:
        """Return the parameters besides `settings`, under the names that they have elsewhere."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


def check_temperature(temperature: object) -> None:
    """Raise `InvalidRequest` unless a temperature is 0 or 1, neither of which changes a beam search."""
    if real("temperature", temperature) not in (0.0, 1.0):
        raise InvalidRequest(f"temperature must be 0 or 1 in a beam search, got {brief(temperature)}", "temperature")

"""`RepetitionDetector`: finds out that an output repeats itself, as some do until `max_tokens`."""

from collections import deque

from shared.params import RepetitionDetectionParams

FINISH_REASON, STOP_REASON = "repetition", "repetition_detected"
"""What is said of an output that was ended for that. The words are vLLM's."""


class RepetitionDetector:
    """Gets the tokens of one output. The time for each depends on `max_pattern_size`, not on the output's length.

    For each size it counts how many of the last tokens equal the one that many positions before. If `size * (n - 1)` of
    them do, the output ends with n copies of a pattern of that size.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._min_size = max(int(params.min_pattern_size), 1)
        self._min_count = params.min_count
        self._recent: deque[int] = deque(maxlen=int(params.max_pattern_size))  # the last token comes first
        self._num_equal: dict[int, int] = {}  # by size, without zeros

    def push(self, token: int) -> bool:
        """Take the next token. Return whether the output ends in a repetition now."""
        sizes = [size for size, other in enumerate(self._recent, 1) if other == token]
        self._num_equal = {size: self._num_equal.get(size, 0) + 1 for size in sizes}
        self._recent.appendleft(token)
        return any(
            count >= size * (self._min_count - 1) for size, count in self._num_equal.items() if size >= self._min_size
        )

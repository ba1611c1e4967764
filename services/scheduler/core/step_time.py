"""`StepTime`: an estimate of how long a step takes, which follows the worker's steps.

A step is taken to cost

    step + rows × row + positions × token    seconds

where `rows` are those of a single position, such as a stream's next token, and `positions` are those of all longer
rows. The estimate starts from what the worker measured in its warm-up, and each result corrects it: contexts grow,
kernels do better on many rows than on few, and other processes take their part of the machine. The planner uses it to
choose how many positions of prompts a step may have beside streams.

A step without longer rows corrects the first two costs, and one with them the third alone. If each step corrected all
three, the estimate of like steps would be right and that of others wrong: it would never find out that there is time
for more positions. But a step that was quicker than its rows alone should have been shows that the first two are too
high.
"""

LEARNING_RATE = 0.3
"""Share of an error that is corrected at once."""

MAX_ERROR = 2.0
"""Factor by which a cost counts at most as higher or lower than expected: a step that has waited for a compiler or for
another process says nothing about the next."""

MIN_SHARE = 0.001
"""Share of a step's fixed cost that one more token costs at least: a factor of nothing is nothing."""


class StepTime:
    """The estimated costs of a step, in seconds. It knows nothing until `restart`."""

    __slots__ = ("row", "step", "token")

    def __init__(self) -> None:
        self.step = self.row = self.token = 0.0

    def restart(self, step_seconds: float, token_seconds: float) -> None:
        """Begin with what a new worker has measured: a step's fixed cost, and the cost of one more token in it.

        Zero means that it has measured nothing; then there is no estimate.
        """
        self.step = step_seconds
        self.row = self.token = max(token_seconds, MIN_SHARE * step_seconds)

    def predict(self, rows: int, positions: int) -> float:
        """Return the seconds of a step; 0 if nothing is known."""
        return self.step + rows * self.row + positions * self.token

    def positions_within(self, seconds: float, rows: int) -> int | None:
        """Return how many positions fit a step of `seconds` beside `rows`; None if nothing is known."""
        if self.token <= 0:
            return None
        return max(int((seconds - self.predict(rows, 0)) / self.token), 0)

    def observe(self, rows: int, positions: int, seconds: float) -> None:
        """Correct the estimate by a step that took `seconds`; 0 if that is not known."""
        if self.token <= 0 or seconds <= 0:
            return
        single = self.predict(rows, 0)
        if positions and seconds > single:
            seen = self.token + _correction(self.token, (seconds - single) / positions)
            self.token = max(seen, MIN_SHARE * self.step)
        else:  # each in proportion to its part of the step
            parts = (self.step, rows * self.row)
            rate = _correction(single, seconds - positions * self.token) / sum(part * part for part in parts)
            self.step *= 1 + rate * parts[0]
            self.row *= 1 + rate * parts[1]


def _correction(expected: float, seen: float) -> float:
    return LEARNING_RATE * (min(max(seen, expected / MAX_ERROR), expected * MAX_ERROR) - expected)

"""The progress bar of `LLM.generate`: finished prompts, and input and output tokens per second."""

import time
from types import TracebackType

from tqdm import tqdm


class ProgressBar:
    """Shows a tqdm bar for the time of a `with` block."""

    def __init__(self, total: int, *, disable: bool) -> None:
        self.bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True, disable=disable)
        self.started = time.monotonic()
        self.input_tokens = self.output_tokens = 0

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()

    def count_finished(self, input_tokens: int, output_tokens: int) -> None:
        """Advance the bar by one prompt of so many tokens, with so many of output, and update the speeds."""
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        seconds = max(time.monotonic() - self.started, 1e-9)
        speeds = f"input {self.input_tokens / seconds:.1f} toks/s, output {self.output_tokens / seconds:.1f} toks/s"
        self.bar.set_postfix_str(speeds, refresh=False)
        self.bar.update(1)

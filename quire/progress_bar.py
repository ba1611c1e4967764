"""The progress bar of `LLM`: finished prompts, and input and output tokens per second."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm import tqdm


class ProgressBar:
    """Shows a tqdm bar for the time of a `with` block.

    `use_tqdm` says whether, or is called with tqdm's arguments to make the bar.
    """

    def __init__(self, total: int, use_tqdm: bool | Callable[..., "tqdm[Any]"]) -> None:
        make = use_tqdm if callable(use_tqdm) else tqdm
        options = {"total": total, "desc": "Processed prompts", "dynamic_ncols": True}
        self.bar = make(**options) if use_tqdm else tqdm(**options, disable=True)
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

"""The progress bar of `LLM.generate`: finished prompts, and input and output tokens per second."""

import time
from types import TracebackType

from tqdm import tqdm

from quire.pending_request import PendingRequest


class ProgressBar:
    """A context manager around tqdm; `finished` moves it by one prompt."""

    def __init__(self, total: int, *, disable: bool) -> None:
        self.bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True, disable=disable)
        self.started = time.monotonic()
        self.tokens_in = self.tokens_out = 0

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()

    def finished(self, request: PendingRequest) -> None:
        """Count a finished prompt."""
        self.tokens_in += len(request.tokens)
        self.tokens_out += request.text.num_output_tokens
        seconds = max(time.monotonic() - self.started, 1e-9)
        speeds = f"input {self.tokens_in / seconds:.1f} toks/s, output {self.tokens_out / seconds:.1f} toks/s"
        self.bar.set_postfix_str(speeds, refresh=False)
        self.bar.update(1)

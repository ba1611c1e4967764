"""`SwapPolicy`: whether a copy in host memory is cheaper than to compute the same tokens again.

A copy is made twice, there and back, by the worker's measured bandwidth. Tokens cost what step_time.py says at this
moment. Both are estimates, but they differ by far more than their errors on most machines: it is the model's size that
decides. A victim whose first blocks others share would be found in the prefix index in part, which is not counted.
"""

from services.scheduler.core.limits import PreemptionMode
from services.scheduler.core.step_time import StepTime


class SwapPolicy:
    """Decides by `mode` and by the measurements of the present worker. It knows nothing until `restart`."""

    __slots__ = ("_block_seconds", "_block_size", "_mode", "_step_time")

    def __init__(self, mode: PreemptionMode, block_size: int, step_time: StepTime) -> None:
        self._mode = mode
        self._block_size = block_size
        self._step_time = step_time
        self._block_seconds = 0.0

    def restart(self, block_seconds: float) -> None:
        """Begin with the seconds in which a new worker copies one block; 0: it has not measured that."""
        self._block_seconds = block_seconds

    def swaps(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether a victim's blocks, which hold `num_tokens` tokens, should go to host memory."""
        return self._mode == "swap" or (self._mode == "auto" and self._is_cheaper(num_blocks, num_tokens))

    @property
    def keeps(self) -> bool:
        """True if a cached block that the device reuses should go to host memory."""
        return self._mode == "swap" or self._is_cheaper(1, self._block_size)

    def seconds(self, num_blocks: int) -> float:
        """Return what a step takes longer for the copies of `num_blocks` blocks."""
        return num_blocks * self._block_seconds

    def _is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        return 0 < 2 * self.seconds(num_blocks) < num_tokens * self._step_time.token

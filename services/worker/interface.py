"""The interface between the worker's service, which owns sockets, and a runner, which owns a model.

It imports no torch, so that a service can be tested with a runner that has no model.
"""

from typing import Protocol

from msgspec import Struct

from shared.protocol import Configure, ModelInfo, StepPlan, StepResult


class WorkerInfo(Struct, frozen=True):
    """A runner's model and device, described for the scheduler: the body of `Register`."""

    model: ModelInfo
    device: str
    kv_bytes_per_token: int  # of all layers, keys and values
    kv_memory: int  # bytes that may hold KV
    step_seconds: float  # the fixed cost of a step, measured
    token_seconds: float  # the cost of one more token in a step, measured
    host_kv_memory: int = 0  # bytes of host memory that may hold KV
    swap_bytes_per_second: float = 0.0  # of copies to host memory or back, whichever is slower, measured
    max_loras: int = 0  # slots of adapters; 0: it takes none
    max_cpu_loras: int = 0  # adapters in host memory
    num_stages: int = 1  # of the pipeline that computes the model


class OutOfMemory(RuntimeError):
    """The device has too little memory for a step. The message says which settings need less."""


class RankLost(RuntimeError):
    """Another rank of the group is gone, or has not answered in time. The message is one line."""


class PendingStep(Protocol):
    """A step that was launched. It may still be running on the device, or be computed when `result` is called."""

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""

    def result(self) -> StepResult:
        """Wait for the step and return its result. It may be called in another thread than `launch`."""


class Runner(Protocol):
    """A model on a device. `configure` comes before the first `launch` of an epoch; plans come in order.

    A step that waits for its device in `launch` is done when that returns.
    """

    @property
    def info(self) -> WorkerInfo: ...
    def configure(self, message: Configure) -> None: ...
    def launch(self, plan: StepPlan) -> PendingStep:
        """Let the device compute a step. Raise OutOfMemory if it has too little memory for it."""

    def load_adapter(self, adapter: int, path: str) -> str:
        """Read the adapter in the folder `path` into host memory, and return the digest of its files.

        Plans of this epoch can name it afterwards. Raise ModelError if it does not fit the model. It may be called in
        another thread than `launch`, but not during `configure`, which forgets all adapters.
        """

    def unload_adapter(self, adapter: int) -> None:
        """Drop an adapter, which no plan names any more, from host memory. Any thread may call it."""

"""`Gate`: holds a worker in front of the step in which a certain request does a certain thing.

So a fault comes at a moment that is sure, and not one that was met by luck. Test and worker share a folder: the test
writes there what to wait for, and the worker that it waits. The worker goes on once the test takes its file away.
"""

import time
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from shared.protocol import NewSequence, Row, StepPlan, unpack_tokens

CHECK_INTERVAL = 0.001  # seconds


class Hold(Struct, frozen=True):
    """What a worker waits in front of, in a request whose prompt begins with the token `marker`.

    `kind` is one of
    - "chunk": a chunk of the prompt that is neither the first nor the last one;
    - "fork": samples part after the prompt;
    - "output": the output token number `index`, from 0, is sampled;
    - "resumed": a sequence with output enters a slot.
    """

    kind: Literal["chunk", "fork", "output", "resumed"]
    marker: int
    index: int = 0


class Gate:
    """The test's and the worker's access to the folder."""

    def __init__(self, folder: Path) -> None:
        self._hold = folder / "hold.json"
        self._reached = folder / "reached"

    @property
    def reached(self) -> bool:
        """True if a worker waits, or has waited when it was killed."""
        return self._reached.exists()

    def arm(self, hold: Hold) -> None:
        """Let the next worker that comes to this moment wait. The gate must be open."""
        new = self._hold.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(hold))
        new.rename(self._hold)

    def open(self) -> None:
        """Let workers pass. Idempotent."""
        self._hold.unlink(missing_ok=True)
        self._reached.unlink(missing_ok=True)

    def read(self) -> Hold | None:
        """Return what to wait for; None if the gate is open."""
        try:
            return msgspec.json.decode(self._hold.read_bytes(), type=Hold)
        except FileNotFoundError:
            return None

    def wait(self, hold: Hold) -> None:
        """Wait until the gate is open, or waits for something else."""
        self._reached.touch()
        while self.read() == hold:
            time.sleep(CHECK_INTERVAL)


class Slots:
    """The sequences in a worker's slots, by which a plan is compared with a `Hold`."""

    def __init__(self) -> None:
        self._sequences: dict[int, NewSequence] = {}

    def apply(self, plan: StepPlan) -> None:
        """Note the sequences that enter slots with this plan."""
        for new in plan.new_sequences:
            self._sequences[new.slot] = new
        for fork in plan.forks:
            for slot, _ in fork.children:
                self._sequences[slot] = self._sequences[fork.parent]

    def matches(self, plan: StepPlan, hold: Hold) -> bool:
        """Return whether the plan, which was applied, does what to wait for."""
        match hold.kind:
            case "fork":
                return any(self._marked(fork.parent, hold) for fork in plan.forks)
            case "resumed":
                entered = [new for new in plan.new_sequences if self._marked(new.slot, hold)]
                return any(len(unpack_tokens(new.tokens)) > new.prompt_len for new in entered)
            case "chunk":
                return any(row.start > 0 and not row.samples for row in plan.rows if self._marked(row.slot, hold))
            case "output":
                return any(self._samples(row, hold.index) for row in plan.rows if self._marked(row.slot, hold))

    def _marked(self, slot: int, hold: Hold) -> bool:
        return bool(unpack_tokens(self._sequences[slot].tokens)[0] == hold.marker)

    def _samples(self, row: Row, index: int) -> bool:
        return bool(row.samples) and row.start + row.count == self._sequences[row.slot].prompt_len + index

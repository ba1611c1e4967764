"""`Registration`: a worker on its connection, and the hold that a scheduler has on its process."""

import os
import signal
from contextlib import suppress

from shared.protocol import VERSION, Register
from shared.transport import Message, show

USER_TIME, SYSTEM_TIME = 11, 12  # of the fields behind the name in /proc/PID/stat

MAX_MEMORY = 2**50
"""Bytes, for KV or for one token's: no machine has so much."""

MAX_STEP = 600.0
"""Seconds, for a step of one token or for one more token: such a worker would serve nobody."""


class Registration:
    """One worker, from its `Register` to the end of its connection."""

    def __init__(self, message: Message, register: Register) -> None:
        self.name = message.peer
        self.fd = message.fd
        self.register = register
        self._pidfd = _open_process(message, register)

    def __repr__(self) -> str:
        return f"{show(self.name)} on {self.register.device}"

    def replaced_by(self, newcomer: "Registration") -> bool:
        """Whether the newcomer shows that this connection is gone: it has its descriptor, or is the same process."""
        local = self._pidfd is not None and newcomer._pidfd is not None
        return self.fd == newcomer.fd or (local and self.register.pid == newcomer.register.pid)

    def kill(self) -> bool:
        """End the process, hung or not; False if it is not within reach."""
        if self._pidfd is None:
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return True

    def cpu_seconds(self) -> float | None:
        """CPU time that the process has used; None if it is not within reach, or does not compute on a CPU."""
        if self._pidfd is None or not self.register.device.startswith("cpu"):
            return None
        try:
            with open(f"/proc/{self.register.pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()  # behind the name, which may hold anything
        except OSError:
            return None
        return (int(fields[USER_TIME]) + int(fields[SYSTEM_TIME])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Let go of the process. Idempotent."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def unfit(register: Register) -> str:
    """Why a worker cannot be used; empty if it can."""
    if register.version != VERSION:
        return f"it speaks version {register.version} of the protocol, this scheduler version {VERSION}"
    if register.rank != 0 or register.world != 1:
        return f"it is rank {register.rank} of {register.world}, but an engine has one worker"
    if register.kv_bytes_per_token < 1 or register.facts.max_positions < 2 or register.facts.vocab_size < 1:
        return "what it says of its model cannot be"
    if max(register.kv_bytes_per_token, register.kv_memory) > MAX_MEMORY:
        return f"it says to have {register.kv_memory} bytes for KV, {register.kv_bytes_per_token} for a token"
    if max(register.step_seconds, register.token_seconds) > MAX_STEP:
        return f"it says to need {register.step_seconds:g} s for a step, {register.token_seconds:g} s for a token"
    return ""


def _open_process(message: Message, register: Register) -> int | None:
    """A handle of the worker's process, if the kernel confirms who it is and that it runs on this host."""
    if message.pid != register.pid:
        return None
    try:
        return os.pidfd_open(register.pid)  # unlike a number, it cannot come to mean another process
    except OSError:
        return None

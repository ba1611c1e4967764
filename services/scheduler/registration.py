"""`Registration`: a worker on its connection, its signs of life, and the scheduler's handle on its process.

A worker is a rank of a group that computes one model together; most groups have one rank.
"""

import os
import signal
from contextlib import suppress

from shared.cpu_usage import CpuMonitor
from shared.liveness import Liveness
from shared.protocol import VERSION, Register
from shared.transport import Message, printable_identity

MAX_MEMORY = 2**50
"""Maximum bytes for all KV, or for one token's, that are believed."""

MAX_STEP_SECONDS = 600.0
"""Maximum seconds for a step of one token, or for one more token. A slower worker would serve nobody."""

MIN_SWAP_BANDWIDTH = 1.0
"""Minimum bytes per second of copies to host memory that are believed, if they were measured. The seconds of a copy
would be infinite otherwise, and estimates of steps no numbers."""

MAX_WORLD_SIZE = 64
"""Maximum ranks of a group."""

MAX_LORAS = 65_536
"""Maximum adapters, in slots or in host memory, that are believed."""


class Registration:
    """A worker, from its `Register` to the end of its connection."""

    def __init__(self, message: Message, register: Register, timeout: float, now: float) -> None:
        self.identity = message.peer  # of its socket
        self.fd = message.fd
        self.register = register
        self._pidfd = _open_process(message, register)  # None if the process is not on this host
        self._cpu_monitor = CpuMonitor(register.pid)
        self.liveness = Liveness(
            timeout, now, cpu_is_progress=register.device.startswith("cpu"), local=self._pidfd is not None
        )

    def __repr__(self) -> str:
        register, name = self.register, printable_identity(self.identity)
        rank = f", rank {register.rank} of {register.world_size}" if register.world_size > 1 else ""
        return f"{name} on {register.device}{rank}"

    def replaced_by(self, newcomer: "Registration") -> bool:
        """Return whether the newcomer has the socket or process of this one."""
        local = self._pidfd is not None and newcomer._pidfd is not None
        return self.identity == newcomer.identity or (local and self.register.pid == newcomer.register.pid)

    def kill(self) -> bool:
        """Kill the process, hung or not. Return False if it is not on this host."""
        if self._pidfd is None:
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return True

    def observe_process(self, now: float, due: float) -> None:
        """Sample the CPU use of a process on this host if a deadline is near. Its step is overdue at time `due`."""
        if self._pidfd is not None and self.liveness.should_observe(now, due):
            self.liveness.observe(self._cpu_monitor.cpu_usage(), now)

    def close(self) -> None:
        """Close the handle on the process. Idempotent."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def incompatibility(register: Register) -> str:
    """Return why a worker cannot be used; empty if it can."""
    if register.version != VERSION:
        return f"it speaks version {register.version} of the protocol, this scheduler version {VERSION}"
    rank, world_size, num_stages = register.rank, register.world_size, register.num_stages
    if not rank < world_size <= MAX_WORLD_SIZE or world_size % num_stages:
        return f"it says to be rank {rank} of {world_size}, in {num_stages} stages of equally many"
    if register.kv_bytes_per_token < 1 or register.model.max_positions < 2 or register.model.vocab_size < 1:
        return "what it says of its model cannot be"
    if max(register.kv_bytes_per_token, register.kv_memory, register.host_kv_memory) > MAX_MEMORY:
        memory = f"{register.kv_memory} bytes for KV and {register.host_kv_memory} on its host"
        return f"it says to have {memory}, {register.kv_bytes_per_token} for a token"
    if max(register.step_seconds, register.token_seconds) > MAX_STEP_SECONDS:
        return f"it says to need {register.step_seconds:g} s for a step, {register.token_seconds:g} s for a token"
    if 0 < register.swap_bytes_per_second < MIN_SWAP_BANDWIDTH:
        return f"it says to copy {register.swap_bytes_per_second:g} bytes a second to host memory"
    if register.max_loras > register.max_cpu_loras or register.max_cpu_loras > MAX_LORAS:
        return f"it says to have slots for {register.max_loras} adapters, and memory for {register.max_cpu_loras}"
    return ""


def disagreement(register: Register, other: Register) -> str:
    """Return why two workers cannot be in line together; empty if they can.

    All groups have one size. The ranks of a group are one worker, so they differ in nothing that plans or results
    depend on. Workers that compute alone replace one another, and the engine says which of them it takes.
    """
    names = ["world_size", "num_stages"]
    if register.world_size > 1:
        names += ["model", "max_loras", "max_cpu_loras"]
    differences = [(name, getattr(register, name), getattr(other, name)) for name in names]
    if register.world_size > 1:
        differences.append(("device", _device_kind(register), _device_kind(other)))
    said = [f"{name} {own!r} instead of {others!r}" for name, own, others in differences if own != others]
    return f"it differs from rank {other.rank}, which came before: {', '.join(said)}" if said else ""


def _device_kind(register: Register) -> str:
    return register.device.partition(":")[0]


def _open_process(message: Message, register: Register) -> int | None:
    """Return a handle of the worker's process if the kernel confirms its id, which it does on this host only."""
    if message.pid != register.pid:
        return None
    try:
        return os.pidfd_open(register.pid)  # unlike a pid, it never refers to another process later
    except OSError:
        return None

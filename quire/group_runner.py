"""`GroupRunner`: a model whose ranks are this process and others, for the offline engine.

The rank that samples is in this process, so its tokens come without a socket; the others are `RankProcesses`. The own
rank begins epochs and computes in a thread, as the worker's does (`services.worker.result_waiter`), so that the caller
hears at once if another rank ends, and can be interrupted. Without one of its ranks, the group is of no use.
"""

import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist
from msgspec.structs import replace

from quire.instance_folder import instance_folder
from quire.rank_processes import RankProcesses
from services.scheduler.config import WorkerCapacity
from services.scheduler.joint_capacity import joint_capacity
from services.worker.config import WorkerConfig
from services.worker.gpus import gpu_variables
from services.worker.runner import ModelRunner
from services.worker.start import start_runner
from shared.errors import ConfigError, EngineFailure, ModelError
from shared.protocol import (
    AdapterLoaded,
    AdapterRefused,
    Configure,
    Configured,
    LoadAdapter,
    Register,
    StepPlan,
    StepResult,
    UnloadAdapter,
)

T = TypeVar("T")
M = TypeVar("M")


class GroupRunner:
    """Runs a model on the ranks of a group; see `Runner`. It is not thread-safe.

    Methods raise `EngineFailure` once a rank is lost. Ctrl-C interrupts waiting alone, so all ranks were told the same.
    """

    def __init__(self, config: WorkerConfig) -> None:
        """Raise `ConfigError`, `ModelError` or `EngineFailure` if the ranks cannot be started."""
        if dist.is_initialized():
            raise ConfigError(
                "a process can have one LLM of several ranks at a time, and no other group of torch.distributed: "
                "close() the other one first"
            )
        own, world_size = config.parallel.sampling_rank, config.parallel.world_size
        others = [rank for rank in range(world_size) if rank != own]
        # The first GPU is for this process.
        variables = gpu_variables(config.device, world_size, os.environ)[1:]
        self._own_rank = own
        self._failure = ""  # why the group is of no use
        self._answers: list[tuple[int, Any]] = []  # of other ranks, that were not asked for yet
        stack = ExitStack()
        self.close = weakref.finalize(self, _close, stack, os.getpid())  # at the end of the interpreter too
        folder = stack.enter_context(instance_folder())
        config = replace(config, rank=own, rendezvous=str(folder), local_rank=own, local_world_size=world_size)
        self._wakes, self._waker = socket.socketpair()
        stack.enter_context(self._wakes)
        stack.enter_context(self._waker)
        self._thread = ThreadPoolExecutor(1, "rank")
        stack.callback(self._thread.shutdown)
        started = self._thread.submit(start_runner, config)
        stack.callback(_leave, self._thread, started)
        configs = [replace(config, rank=rank, local_rank=rank) for rank in others]
        self._ranks = RankProcesses(configs, variables, folder)
        stack.callback(self._ranks.close)  # the first to be called, so that the own rank waits for nobody after it
        self._ranks.wake_by(self._wakes.fileno())
        try:
            self._runner = started.result()
            self._registers = self._gather(Register)
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> WorkerCapacity:
        """The capacity of all ranks together."""
        ranks: list[WorkerCapacity] = [*sorted(self._registers, key=lambda register: register.rank)]
        ranks.insert(self._own_rank, self._runner.info)
        return joint_capacity(ranks)

    def configure(self, message: Configure) -> None:
        """Let all ranks begin an epoch, and wait until they have."""
        with self._uninterrupted():
            self._ranks.send(message)
            configured = self._thread.submit(self._runner.configure, message)
        self.wait(configured)
        while any(answer.epoch != message.epoch for answer in self._gather(Configured)):
            pass  # of an epoch whose beginning was interrupted

    def launch(self, plan: StepPlan) -> "GroupStep":
        """Let all ranks compute a step."""
        with self._uninterrupted():
            self._ranks.send(plan)
            result = self._thread.submit(self._runner.launch(plan).result)
        return GroupStep(self, result)

    def load_adapter(self, adapter: int, path: str) -> str:
        """Read an adapter into the host memory of all ranks. Raise ModelError if one of them refuses it."""
        digest = self._runner.load_adapter(adapter, path)
        with self._uninterrupted():
            self._ranks.send(LoadAdapter(adapter, path))
        answers = self._gather((AdapterLoaded, AdapterRefused))
        refused = next((answer for answer in answers if isinstance(answer, AdapterRefused)), None)
        if refused is not None:
            self.unload_adapter(adapter)
            raise ModelError(refused.detail)
        return digest

    def unload_adapter(self, adapter: int) -> None:
        """Drop an adapter from the host memory of all ranks."""
        with self._uninterrupted():
            self._ranks.send(UnloadAdapter(adapter))
        self._runner.unload_adapter(adapter)

    def wait(self, future: "Future[T]") -> T:
        """Wait for what the own rank does."""
        future.add_done_callback(partial(_wake, self._waker))
        while not future.done():
            self._receive()
        self._wakes.recv(64)
        try:
            return future.result()
        except Exception as error:  # the others may be waiting for this rank, or it has lost one
            self._failure = f"its rank in this process failed: {error}"
            raise EngineFailure(f"this LLM cannot go on: {self._failure}") from error

    def _gather(self, kind: type[M] | tuple[type[M], ...]) -> list[M]:
        """Wait for the next answer of this kind from each of the other ranks."""
        answers: dict[int, M] = {}
        while True:
            for item in list(self._answers):
                rank, answer = item
                if isinstance(answer, kind) and rank not in answers:
                    answers[rank] = answer
                    self._answers.remove(item)
            if len(answers) == self._ranks.number:
                return list(answers.values())
            self._receive()

    def _receive(self) -> None:
        self._check()
        self._ranks.wait()
        with self._uninterrupted():
            self._answers += self._ranks.receive()

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Let Ctrl-C wait for the end of the block: all ranks are told the same, or none, and no answer is lost."""
        self._check()
        with _interrupts_deferred():
            try:
                yield
            except EngineFailure as error:
                self._failure = str(error)
                raise

    def _check(self) -> None:
        if self._failure:
            raise EngineFailure(f"this LLM cannot go on: {self._failure}")


class GroupStep:
    """A step that all ranks compute."""

    is_done = False

    def __init__(self, runner: GroupRunner, result: "Future[StepResult]") -> None:
        self._runner, self._result = runner, result

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        return self._runner.wait(self._result)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block. Only the main thread is ever interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, came[-1])


def _close(stack: ExitStack, process: int) -> None:
    """End the group, unless this is a fork of the process that has it."""
    if os.getpid() == process:
        stack.close()


def _wake(waker: socket.socket, _: "Future[Any]") -> None:
    waker.send(b"\0")


def _leave(thread: ThreadPoolExecutor, started: "Future[ModelRunner]") -> None:
    """Let the own rank leave its group, so that another LLM of this process can have one."""
    if started.done() and started.exception() is None:
        with suppress(RuntimeError):  # the interpreter ends, and the thread has ended
            thread.submit(started.result().close).result()

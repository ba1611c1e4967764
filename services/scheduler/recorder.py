"""The flight recorder: a core that writes its inputs to a ring of files.

Each file begins with the state of the core at that moment, so it can be replayed without the files before it, which may
be gone.

A plan is encoded once, for its digest and for the worker, and a result is written as it came from there. Both wait as
bytes until `FLUSH_INTERVAL` has passed or another input comes, and are written together: between two steps, what
writes them has left the CPU's caches. Nothing is ever synced. After SIGKILL the last of that time is missing, and after
a power failure maybe more.

Recording never harms serving. If the folder cannot be written to at the start, the start fails; if that happens later,
one line in the log says so, and recording ends.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import msgspec

from services.scheduler.core import NO_RESOURCES, Limits, Scheduler, WorkerResources
from services.scheduler.core.state import dump_state
from services.scheduler.record import (
    MAGIC,
    Aborted,
    AdapterAdded,
    AdapterAnswered,
    AdapterMessagesTaken,
    AdapterRemoved,
    Began,
    Committed,
    CommittedEncoded,
    Drained,
    Ended,
    Entry,
    Head,
    Input,
    Left,
    Lost,
    Planned,
    Reset,
    Submitted,
    digest,
    pack_entry,
    state_digest,
)
from shared.errors import ConfigError
from shared.protocol import (
    VERSION,
    AdapterLoaded,
    AdapterRefused,
    Epoch,
    LoadAdapter,
    ProgressRow,
    Refused,
    StepPlan,
    StepResult,
    Submit,
    UnloadAdapter,
    encode,
)

logger = logging.getLogger(__name__)

MAX_FILES = 8
FILE_BYTES = 8 * 2**20
"""Bytes of inputs after which the next file begins. Its head, which is the core's state, comes on top of them."""

INPUTS_PER_HEAD = 1
"""Bytes of inputs, for each byte of the head, before the next file begins: the engine stands still while a head is
made, so large ones have to be rare."""

BUFFER_BYTES = 64 * 1024
FLUSH_INTERVAL = 0.1  # seconds
SUFFIX = ".record"


def prepare_folder(folder: str) -> Path:
    """Make the folder of records, if it is not there. Raise `ConfigError` if nothing can be written to it."""
    path = Path(folder)
    probe = path / f".{os.getpid()}.probe"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.write_bytes(MAGIC)
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--record {folder}: {error.strerror}") from error
    return path


class Recorder:
    """The ring of files of one engine: at most `MAX_FILES` in the folder, those of former processes included.

    Engines of different names may share a folder. `clock` is the one whose times the core is told.
    """

    def __init__(self, folder: str, engine: str, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting: list[tuple[float, bytes | None, bytes]] = []  # of `add_plan` and `add_result`
        self._folder = prepare_folder(folder)
        self._engine = engine
        self._model = model
        self.clock = clock
        self._prefix = quote(engine, safe="")
        self._file: BinaryIO | None = None
        self.flush_due = 0.0  # by the core's clock
        self._size = 0  # bytes of inputs in the file
        self._max_size = FILE_BYTES

    @property
    def file_is_full(self) -> bool:
        """True if the next file should begin."""
        return self._size >= self._max_size

    def begin(self, core: Scheduler) -> None:
        """Begin the first file."""
        self._guard(self._open, Head(**self._facts(), continues=False, limits=core.limits, state=dump_state(core)))

    def go_on(self, core: Scheduler) -> None:
        """End this file and begin the next one."""
        state = dump_state(core)
        self._end(state)
        if self._file is not None:
            self._guard(self._open, Head(**self._facts(), continues=True, limits=core.limits, state=state))

    def end(self, core: Scheduler) -> None:
        """End the last file with the core's state."""
        if self._file is not None:
            self._end(dump_state(core))
            self._file = None

    def add_plan(self, now: float, plan: bytes | None) -> None:
        """Add a call of `plan`, to be written soon, and the plan as it is sent; None if there was none."""
        self._waiting.append((now, plan, b""))

    def add_result(self, now: float, result: bytes) -> None:
        """Add a result as it came, to be written soon."""
        self._waiting.append((now, None, result))

    def write(self, entry: Entry) -> None:
        """Write an entry to the file's buffer, behind those that wait."""
        self._write_waiting()
        self._write(entry)

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for now, plan, result in waiting:
            if result:
                self._write(CommittedEncoded(now, msgspec.Raw(result)))
            else:
                self._write(Planned(now, None if plan is None else digest(plan)))

    def _write(self, entry: Entry | CommittedEncoded) -> None:
        if self._file is not None:
            data = pack_entry(entry)
            self._size += len(data)
            try:
                self._file.write(data)
            except OSError as error:
                self._give_up(error)

    def __del__(self) -> None:
        """Write what waits when an exception has ended the process. The file writes its buffer by itself."""
        self._write_waiting()

    def flush(self, now: float) -> None:
        """Empty the buffer into the file. Call it when `flush_due` has come."""
        self._write_waiting()
        self.flush_due = now + FLUSH_INTERVAL
        if self._file is not None:
            self._guard(self._file.flush)

    def _end(self, state: bytes) -> None:
        self.write(Ended(state_digest(state)))
        if self._file is not None:
            self._guard(self._file.close)

    def _facts(self) -> dict[str, Any]:
        started, now = time.time(), self.clock()
        return {"protocol": VERSION, "engine": self._engine, "model": self._model, "started": started, "now": now}

    def _open(self, head: Head) -> None:
        for old in self._files()[: -(MAX_FILES - 1)]:
            old.unlink(missing_ok=True)
        path = self._folder / f"{self._prefix}-{time.time_ns()}{SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = open(descriptor, "wb", buffering=BUFFER_BYTES)  # noqa: SIM115 - `close` closes it
        packed = pack_entry(head)
        self._size, self._max_size = 0, max(FILE_BYTES, INPUTS_PER_HEAD * len(packed))
        self._file.write(MAGIC + packed)
        self._file.flush()

    def _files(self) -> list[Path]:
        """Return this engine's files, oldest first."""
        pattern = re.compile(re.escape(self._prefix) + r"-(\d+)" + re.escape(SUFFIX))
        found = ((pattern.fullmatch(path.name), path) for path in self._folder.iterdir())
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]

    def _guard(self, action: Callable[..., object], *arguments: object) -> None:
        """Do something with files. End the recording if it fails."""
        try:
            action(*arguments)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.error("--record %s: %s: nothing is recorded from now on", self._folder, error.strerror)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


class RecordedScheduler(Scheduler):
    """A core that writes down each input: before it acts on it, so that a record shows what an exception came from."""

    # in slots, since the state of a core is what is in its `vars`
    __slots__ = ("_held", "_recorded_now", "_recorder", "encoded_plan")

    def __init__(self, limits: Limits, recorder: Recorder) -> None:
        super().__init__(limits)
        self._held: float | None = None  # the time of a call that only told it, not recorded yet
        self._recorded_now = self._now  # the core's time after the last input that was recorded
        self._recorder = recorder
        self.encoded_plan = b""  # the last plan, so that it need not be encoded again to be sent
        recorder.begin(self)

    def begin_epoch(self, epoch: Epoch, num_blocks: int, worker: WorkerResources = NO_RESOURCES) -> None:
        self._record(Began(self._recorder.clock(), epoch, num_blocks, worker))
        super().begin_epoch(epoch, num_blocks, worker)

    def lose_worker(self, now: float, *, out_of_memory: bool = False) -> list[ProgressRow]:
        self._record(Lost(now, out_of_memory))
        self._recorded_now = now
        return super().lose_worker(now, out_of_memory=out_of_memory)

    def end_epoch(self) -> None:
        self._record(Left(self._recorder.clock()))
        super().end_epoch()

    def submit(self, request: Submit, now: float) -> Refused | None:
        self._record(Submitted(now, request))
        self._recorded_now = now
        return super().submit(request, now)

    def abort(self, id: int, sample: int = -1) -> list[ProgressRow]:
        self._record(Aborted(self._recorder.clock(), id, sample))
        return super().abort(id, sample)

    def plan(self, now: float) -> StepPlan | None:
        recorder = self._recorder
        if now >= recorder.flush_due:
            recorder.flush(now)
        if self._only_tells_time():
            self._held = None if now == self._recorded_now else now
            self._now = now
            return None
        if recorder.file_is_full:
            self._begin_file()
        encoded = None
        try:
            plan = super().plan(now)
            if plan is not None:
                self.encoded_plan = encoded = encode(plan)
        finally:  # its digest is known only now
            recorder.add_plan(now, encoded)
            self._recorded_now = now
        return plan

    def commit(self, result: StepResult, encoded: bytes = b"") -> list[ProgressRow]:
        """Commit a result; `encoded` is the message in which it came, if it came in one."""
        now = self._recorder.clock()
        if encoded:
            self._prepare()
            self._recorder.add_result(now, encoded)
        else:
            self._record(Committed(now, result))
        return super().commit(result)

    def add_adapter(self, name: str, path: str, *, replaces: bool = False) -> int | str:
        self._record(AdapterAdded(self._recorder.clock(), name, path, replaces))
        return super().add_adapter(name, path, replaces=replaces)

    def remove_adapter(self, name: str) -> str:
        self._record(AdapterRemoved(self._recorder.clock(), name))
        return super().remove_adapter(name)

    def adapter_loaded(self, number: int, digest: str) -> list[ProgressRow]:
        self._record(AdapterAnswered(self._recorder.clock(), AdapterLoaded(number, digest)))
        return super().adapter_loaded(number, digest)

    def adapter_refused(self, number: int, detail: str) -> list[ProgressRow]:
        self._record(AdapterAnswered(self._recorder.clock(), AdapterRefused(number, detail)))
        return super().adapter_refused(number, detail)

    def take_adapter_messages(self) -> list[LoadAdapter | UnloadAdapter]:
        if self._adapters.has_messages:  # the service asks in each turn
            self._record(AdapterMessagesTaken(self._recorder.clock()))
        return super().take_adapter_messages()

    def reset_prefix_cache(self) -> None:
        self._record(Reset(self._recorder.clock()))
        super().reset_prefix_cache()

    def drain(self) -> None:
        self._record(Drained(self._recorder.clock()))
        super().drain()

    def end_record(self) -> None:
        """End the record. Nothing may be called after that."""
        self._record_held()
        self._recorder.end(self)

    def _only_tells_time(self) -> bool:
        """Return whether a call of `plan` would do nothing but tell the core the time.

        The service makes several such calls a step, and four a second when it is idle, which would fill the ring in
        time. Only the last of them in a row is recorded, and none if the time is the one that was told before. Only an
        input ends such a row, since no time does.
        """
        full = len(self._in_flight) >= self.limits.depth
        return full or not (self._in_flight or self.unfinished or self._quarantine.active or self._adapters.has_added)

    def _prepare(self) -> None:
        """Get ready to record an input that the core has not seen yet."""
        if self._recorder.file_is_full:
            self._begin_file()
        if self._held is not None:
            self._record_held()

    def _record(self, entry: Input) -> None:
        """Record an input that the core has not seen yet."""
        self._prepare()
        recorder = self._recorder
        recorder.write(entry)
        if entry.now >= recorder.flush_due:
            recorder.flush(entry.now)

    def _begin_file(self) -> None:
        """Begin the next file. It must be called between two inputs, never within one."""
        self._record_held()
        self._recorder.go_on(self)

    def _record_held(self) -> None:
        if self._held is not None:
            self._recorder.add_plan(self._held, None)
            self._recorded_now = self._held
            self._held = None

"""A worker without a model: the real worker service with `ScriptedRunner`.

    python tests/scripted_worker.py --scheduler ADDRESS --script FILE

The script lists replies and failures. The next token of a sequence is
- the next one of a reply of the script, for a prompt that contains the reply's `prompt` (then end-of-sequence forever);
- else, if the first token of the prompt is CHAIN, a digest of all tokens before it, of the sample's index and of the
  sequence's adapter, so that any token lost, doubled or out of order changes all that follow;
- else the last token plus one.

An adapter is a folder with a file `number`: the adapter is this number.

While there is a file --pace, each step takes as many seconds as it says, instead of what the script says.

With --tensor-parallel-size, --pipeline-parallel-size and --rank it is a rank of a group. The ranks exchange nothing:
each computes all that it can know. Those before the last stage know of the tokens that are sampled what plans say.
"""

import argparse
import ctypes
import hashlib
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from services.worker.config import WorkerConfig
from services.worker.interface import WorkerInfo
from services.worker.parallel_config import ParallelConfig
from services.worker.service import serve
from shared.curve import load_connection_keys
from shared.errors import ModelError
from shared.protocol import (
    Configure,
    ModelInfo,
    NewSequence,
    Row,
    SampledRow,
    StepPlan,
    StepResult,
    TokenLogprobs,
    unpack_tokens,
)
from shared.startup import configure_logging, end_with_supervisor, start_logging

CHAIN = 2


class Reply(Struct):
    """The output for prompts that contain `prompt`."""

    prompt: list[int]
    tokens: list[int]


class ScriptedFailure(Struct):
    """Lets a step fail that computes a sequence with `token` in its prompt, in the first `lives` processes.

    Only `rank` fails, if it is set.

    `kind` is one of
    - "raise", "memory", "exit": raise an error, run out of memory, or end the process;
    - "hang", "loop": sleep or compute forever;
    - "hang_with_gil", "loop_with_gil": the same without releasing the GIL;
    - "garbage", "missing": return a malformed result, or one without rows.
    """

    token: int
    kind: str
    lives: int = 1_000_000
    rank: int | None = None


class Script(Struct):
    """The behaviour of a `ScriptedRunner`."""

    vocab_size: int = 1000
    eos: int = 0
    max_positions: int = 2048
    blocks: int = 256  # of 16 tokens
    delay: float = 0.0  # seconds a step
    token_delay: float = 0.0  # seconds more for each token computed in it
    start_delay: float = 0.0  # seconds to load
    fingerprint: str = "scripted"
    model: str = "scripted"
    text: str = ""
    max_loras: int = 0
    max_cpu_loras: int = 0
    replies: list[Reply] = []
    failures: list[ScriptedFailure] = []


class Slot(Struct):
    """A running sequence."""

    sequence: NewSequence
    tokens: list[int]


class FinishedStep:
    """A step whose result is there."""

    is_done = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class ScriptedRunner:
    """A runner that follows a script. `life` is the number of processes that ran this script before.

    `pace` is a file that may say how long a step takes.
    """

    def __init__(
        self, script: Script, life: int = 0, parallel: ParallelConfig | None = None, pace: Path | None = None
    ) -> None:
        self.script = script
        self.pace = pace
        self.life = life
        self.parallel = parallel or ParallelConfig()
        self.slots: dict[int, Slot] = {}
        self.adapters: dict[int, int] = {}  # in host memory, by number of the load
        self.adapter_slots: dict[int, int] = {}
        time.sleep(script.start_delay)

    @property
    def info(self) -> WorkerInfo:
        script = self.script
        model = ModelInfo(
            name=script.model,
            architecture="Scripted",
            dtype="none",
            max_positions=script.max_positions,
            vocab_size=script.vocab_size,
            fingerprint=script.fingerprint,
            text_digest=script.text,
        )
        return WorkerInfo(
            model,
            "cpu",
            1,
            script.blocks * 16,
            max(script.delay, 1e-4),
            0.0,
            max_loras=script.max_loras,
            max_cpu_loras=script.max_cpu_loras,
            num_stages=self.parallel.pipeline_parallel_size,
        )

    def configure(self, message: Configure) -> None:
        self.slots, self.adapters, self.adapter_slots = {}, {}, {}

    def load_adapter(self, adapter: int, path: str) -> str:
        try:
            number = int((Path(path) / "number").read_text())
        except OSError as error:
            raise ModelError(f"{path} is no adapter: {error.strerror}") from error
        self.adapters[adapter] = number
        if len(self.adapters) > self.script.max_cpu_loras:
            raise RuntimeError("there is no memory for so many adapters")
        return f"digest of {number}"

    def unload_adapter(self, adapter: int) -> None:
        del self.adapters[adapter]

    def launch(self, plan: StepPlan) -> FinishedStep:
        return FinishedStep(self._execute(plan))

    def _execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.released_slots:
            del self.slots[slot]
        for new in plan.new_sequences:
            self.slots[new.slot] = Slot(new, list(unpack_tokens(new.tokens)))
        starts = {row.slot: row.start for row in plan.rows}
        for slot, token in plan.sampled:
            self._hear_sampled(slot, starts[slot], token)
        for slot, adapter in plan.adapter_slots:
            self.adapter_slots[slot] = self.adapters[adapter]
        for row in plan.rows:
            self._fail(self.slots[row.slot])
        seconds = self._delay() + self.script.token_delay * sum(row.count for row in plan.rows)
        time.sleep(seconds)
        rows = [sampled for row in plan.rows if (sampled := self._compute(row)) is not None]
        for fork in plan.forks:
            parent = self.slots[fork.parent]
            for slot, sample in fork.children:
                sequence = msgspec.structs.replace(parent.sequence, sample=sample)
                num_sampled = int(self.parallel.is_last_stage)  # by the parent, in this step
                self.slots[slot] = Slot(sequence, parent.tokens[: len(parent.tokens) - num_sampled])
                rows.append(self._sample(slot, self.slots[slot]))
        reports = self.parallel.rank == self.parallel.sampling_rank
        result = StepResult(plan.epoch, plan.step, rows if reports else [], max(seconds, 1e-4))
        return self._corrupt(plan, result)

    def _delay(self) -> float:
        if self.pace is not None:
            with suppress(FileNotFoundError):
                return float(self.pace.read_text())
        return self.script.delay

    def _hear_sampled(self, index: int, position: int, token: int) -> None:
        tokens = self.slots[index].tokens
        if not self.parallel.is_last_stage:
            tokens.append(token)
        if len(tokens) != position + 1 or tokens[position] != token:
            raise ValueError(f"slot {index} hears of token {token} at {position}, but has {tokens}")

    def _compute(self, row: Row) -> SampledRow | None:
        slot = self.slots[row.slot]
        num_tokens, end = len(slot.tokens), row.start + row.count
        if end > num_tokens:
            raise ValueError(f"slot {row.slot} has {num_tokens} tokens, but the plan computes up to {end}")
        scores = self._prompt_logprobs(slot, row)
        if not row.samples:
            return SampledRow(row.slot, [], None, scores) if scores else None
        if end != num_tokens:
            raise ValueError(f"slot {row.slot} has {num_tokens} tokens, but the plan samples behind {end}")
        return msgspec.structs.replace(self._sample(row.slot, slot), prompt_logprobs=scores or None)

    def _sample(self, index: int, slot: Slot) -> SampledRow:
        token = self._next(slot)
        if self.parallel.is_last_stage:
            slot.tokens.append(token)
        count = slot.sequence.sampling.logprobs
        logprobs = None if count < 0 else [self._logprob(token, count)]
        return SampledRow(index, [token], logprobs)

    def _next(self, slot: Slot) -> int:
        sequence, tokens, script = slot.sequence, slot.tokens, self.script
        prompt, position = tokens[: sequence.prompt_len], len(tokens) - sequence.prompt_len
        for reply in script.replies:
            if contains(prompt, reply.prompt):
                return reply.tokens[position] if position < len(reply.tokens) else script.eos
        if tokens[0] == CHAIN:
            adapter = 0 if sequence.adapter_slot < 0 else self.adapter_slots[sequence.adapter_slot]
            return chain(tokens, sequence.sample, script.vocab_size, adapter)
        return (tokens[-1] + 1) % script.vocab_size

    def _prompt_logprobs(self, slot: Slot, row: Row) -> list[TokenLogprobs]:
        count = slot.sequence.sampling.prompt_logprobs
        last = min(row.start + row.count, slot.sequence.prompt_len - 1)
        positions = range(row.start + 1, last + 1) if count >= 0 else range(0)
        return [self._logprob(slot.tokens[position], count) for position in positions]

    def _logprob(self, token: int, count: int) -> TokenLogprobs:
        others = [(token + away) % self.script.vocab_size for away in range(count)]
        return TokenLogprobs(-0.25, 1, others, [-0.25 - away for away in range(count)])

    def _failures(self, slot: Slot) -> list[str]:
        prompt = slot.tokens[: slot.sequence.prompt_len]
        return [
            one.kind
            for one in self.script.failures
            if one.token in prompt and self.life < one.lives and one.rank in (None, self.parallel.rank)
        ]

    def _fail(self, slot: Slot) -> None:
        for kind in self._failures(slot):
            match kind:
                case "raise":
                    raise RuntimeError("scripted failure")
                case "memory":
                    raise MemoryError("scripted lack of memory")
                case "hang":
                    time.sleep(3600)
                case "hang_with_gil":
                    ctypes.PyDLL(None).sleep(3600)
                case "loop":
                    while True:
                        pass
                case "loop_with_gil":
                    sum(range(10**15))
                case "exit":
                    sys.exit(3)

    def _corrupt(self, plan: StepPlan, result: StepResult) -> StepResult:
        kinds = {kind for row in plan.rows for kind in self._failures(self.slots[row.slot])}
        if "garbage" in kinds:
            return msgspec.structs.replace(result, step="nonsense")
        return msgspec.structs.replace(result, rows=[]) if "missing" in kinds else result


def contains(tokens: list[int], part: list[int]) -> bool:
    """Return whether `part` is a sublist of `tokens`."""
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens) - len(part) + 1))


def chain(tokens: list[int], sample: int, vocab_size: int, adapter: int = 0) -> int:
    """Return a token that depends on all before it: 3 or more, since those below are special."""
    packed = struct.pack(f"<{len(tokens) + 1}i", sample, *tokens)
    digest = hashlib.blake2b(packed, digest_size=8, key=bytes([adapter])).digest()
    return 3 + int.from_bytes(digest, "little") % (vocab_size - 3)


def expected_chain(
    prompt: list[int], count: int, sample: int = 0, vocab_size: int = 1000, adapter: int = 0
) -> list[int]:
    """Return what an undisturbed run generates for a prompt that begins with CHAIN."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(chain(tokens, sample, vocab_size, adapter))
    return tokens[len(prompt) :]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheduler", required=True)
    parser.add_argument("--script", type=Path)
    parser.add_argument("--life", type=int, default=0)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--supervisor", type=int, default=0)
    parser.add_argument("--scheduler-timeout", type=float, default=300.0)
    parser.add_argument("--zmq-keys", default="")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    script = msgspec.json.decode(args.script.read_bytes(), type=Script) if args.script else Script()
    start_logging()
    configure_logging("worker", "info", args.log_format)
    end_with_supervisor(args.supervisor)
    config = WorkerConfig(
        scheduler=args.scheduler,
        supervisor=args.supervisor,
        scheduler_timeout=args.scheduler_timeout,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        rank=args.rank,
    )
    runner = ScriptedRunner(script, args.life, config.parallel, args.pace)
    return serve(config, runner, load_connection_keys(args.zmq_keys, "worker"))


if __name__ == "__main__":
    sys.exit(main())

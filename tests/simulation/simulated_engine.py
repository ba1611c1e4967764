"""A core, a worker and a clock, driven by hand or by chance, with every promise checked at each move.

Results come back late: a plan is executed when it is made (a device runs plans in order, whenever the answer
arrives), and its result is held until `deliver`.
"""

from collections import Counter, deque
from random import Random
from typing import Any

from core_invariants import check, check_writes
from msgspec.structs import replace
from simulated_worker import SimulatedWorker, Stream, alone

from services.scheduler.core import Limits, Scheduler
from services.scheduler.core.policy import may_preempt
from services.scheduler.core.sequence import State
from shared.protocol import (
    Configure,
    Epoch,
    FinishReason,
    ProgressRow,
    Refused,
    Sampling,
    SchedulingInfo,
    StepPlan,
    StepResult,
    Submit,
    TokenLogprobs,
    pack_tokens,
)


class Client:
    """The client of one sample: what it was sent, and what it should be sent."""

    def __init__(self, oracle: Stream, output: list[int], prompt_len: int) -> None:
        self.oracle = oracle
        self.output = list(output)
        self.scores: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = -1
        self.admission: SchedulingInfo | None = None
        self.first_step: int | None = None  # committed steps when its first token came
        self.prompt_len = prompt_len
        self._may_hit = prompt_len if output else prompt_len - 1

    def receive(self, row: ProgressRow, steps: int) -> None:
        """Raise AssertionError for news that do not continue the stream, or differ from the undisturbed run."""
        assert self.finish_reason is None, "nothing comes after the end"
        assert row.position == len(self.output), "output positions are contiguous"
        if row.tokens and self.first_step is None:
            self.first_step = steps
        if row.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
            assert row.scheduling is not None or self.admission is not None, "its first row says how it came to run"
        if row.scheduling is not None:
            assert row.scheduling != self.admission, "it is sent when it has changed"
            if self.admission is not None:
                assert row.scheduling.queued_seconds == self.admission.queued_seconds, (
                    "it is admitted for the first time once"
                )
                assert row.scheduling.preemptions > self.admission.preemptions
            self.admission = row.scheduling
        self.output += row.tokens
        self.scores += row.prompt_logprobs or []
        expected = self.oracle.tokens[row.position : row.position + len(row.tokens)]
        assert row.tokens == expected, "tokens are those of the undisturbed run"
        assert self.scores == self.oracle.scores[: len(self.scores)], "each score is sent once, in order"
        assert 0 <= row.cached_tokens <= self._may_hit, "at least one known token is always run"
        self.cached_tokens = row.cached_tokens
        self.finish_reason = row.finish_reason
        if row.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (self.output, row.finish_reason) == (self.oracle.tokens, self.oracle.finish), (
                "it ends where it should"
            )
            assert self.scores == self.oracle.scores, "the whole prompt was scored"


class Order:
    """Checks that a plan keeps to the one order. It is made before the plan is."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._quarantined = core._quarantine.active
        self._waiting = list(core._queues.waiting.items)
        self._first = next(iter(core._queues.running.items), None)

    def check(self, plan: StepPlan | None) -> None:
        """Raise AssertionError if a sequence was passed by one behind it, or the first preempted for those behind."""
        if self._core._quarantine.active and plan is not None:
            assert set(self._core._in_flight[-1].sequences) <= set(self._core._quarantine.group), (
                "suspects have no company"
            )
        if self._quarantined:
            return
        first, stay = self._first, [sequence for sequence in self._waiting if sequence.state is State.WAITING]
        if first is not None and first.state is not State.RUNNING:
            preempting = [one for one in self._waiting if may_preempt(self._core.limits, one, first)]
            assert preempting, "the first is no victim"
        if plan is not None and plan.new_sequences and stay:
            slots = {new.slot for new in plan.new_sequences}
            admitted = [one for one in self._core._queues.running.items if one.slot in slots]
            assert max(one.key for one in admitted) < min(one.key for one in stay), "nobody is passed by another"


class SimulatedEngine:
    """Keeps what clients asked and were sent, and checks the core after each move."""

    def __init__(self, limits: Limits, *, checked: bool = True) -> None:
        self.core = Scheduler(limits)
        self.limits = limits
        self.clients: dict[tuple[int, int], Client] = {}
        self.results: deque[StepResult] = deque()
        self.stale: list[StepResult] = []
        self.plans: list[StepPlan] = []  # of the epoch
        self.now = 1000.0
        self.poison: dict[int, int] = {}  # seed: position at which computing it kills the worker
        self._checked = checked
        self.seen: Counter[str] = Counter()  # how often what happened, to see that workloads reach it
        self._ids = 0
        self._epochs = 0
        self.worker: SimulatedWorker | None = None
        self.begin()

    def begin(self) -> None:
        """Begin an epoch with a new worker."""
        self._epochs += 1
        limits, epoch = self.limits, Epoch("boot", self._epochs)
        self.core.begin_epoch(epoch, limits.num_blocks)
        self.worker = SimulatedWorker(
            Configure(
                epoch,
                limits.block_size,
                limits.num_blocks,
                limits.max_num_seqs,
                limits.max_model_len,
                limits.max_num_batched_tokens,
            )
        )
        self.plans = []
        self.check()

    def lose(self) -> None:
        """Let the worker die, with the results that are not back."""
        self.stale += self.results
        self.results.clear()
        self.worker = None
        self._receive(self.core.lose_worker(self.now))
        assert self.core.plan(self.now) is None, "no plan without a worker"
        self.check()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        seed: int | None = None,
        output: list[int] = [],  # noqa: B006 - read only
        n: int = 1,
        sample: int = 0,
        priority: int = 0,
        arrival: float = 0.0,
        samples_before: int = 0,
        stops: list[int] = [],  # noqa: B006 - read only
        min_tokens: int = 0,
        prompt_logprobs: int = -1,
    ) -> Refused | int:
        """Submit a request. Return the refusal, or its id."""
        self._ids += 1
        sampling = Sampling(
            max_tokens=max_tokens,
            seed=self._ids if seed is None else seed,
            stop_token_ids=stops,
            min_tokens=min_tokens,
            prompt_logprobs=prompt_logprobs,
        )
        tokens, came = pack_tokens(prompt + output), arrival or self.now
        request = Submit(self._ids, tokens, len(prompt), sampling, n, sample, priority, came, samples_before)
        refused = self.core.submit(request, self.now)
        if refused is not None:
            assert refused.id == self._ids
            return refused
        for index in range(sample, sample + n):
            scored = sampling if index == 0 else replace(sampling, prompt_logprobs=-1)
            oracle = alone(prompt + output, len(prompt), scored, index)
            self.clients[self._ids, index] = Client(oracle, output, len(prompt))
        self.check()
        return self._ids

    def accept(self, prompt: list[int], max_tokens: int, **options: Any) -> int:
        """Submit a request that must not be refused. Return its id."""
        id = self.submit(prompt, max_tokens, **options)
        assert isinstance(id, int), id
        return id

    def abort(self, id: int, sample: int = -1) -> None:
        """Abort a request, or one sample of it, and check that it has ended then."""
        self._receive(self.core.abort(id, sample))
        for (other, index), client in self.clients.items():
            assert other != id or sample not in (-1, index) or client.finish_reason is not None
        self.check()

    def plan(self) -> StepPlan | None:
        """Make a plan and execute it, even if the worker dies of it."""
        order = Order(self.core)
        plan = self.core.plan(self.now)
        if self._checked:
            order.check(plan)
        if plan is None:
            assert self.core.idle or self.core.in_flight or self.worker is None, "it never stands still"
            return None
        assert self.worker is not None
        if self._checked:
            check_writes(self.core)
        self.plans.append(plan)
        self._see(plan)
        self.results.append(self.worker.execute(plan))
        self.check()
        if self._deadly(plan):
            self.lose()
        return plan

    def deliver(self) -> list[ProgressRow]:
        """Give the oldest result back to the core."""
        self.stale.append(self.results.popleft())
        news = self.core.commit(self.stale[-1])
        self._receive(news)
        self.check()
        return news

    def deliver_stale(self, chance: Random) -> None:
        """Check that a result changes nothing if it is of another epoch, was there before, or is early."""
        wrong = [*self.stale[-3:], *list(self.results)[1:]]
        if self.results:
            wrong += [result for result in self.stale if result.step == self.results[0].step]
        if not wrong:
            return
        result = chance.choice(wrong)
        before = self.core.snapshot()
        assert self.core.commit(result) == []
        assert self.core.snapshot() == before

    def step(self) -> None:
        """Plan as far as may be, then take one result."""
        while self.plan() is not None:
            pass
        if self.worker is None:
            self.begin()
        elif self.results:
            self.deliver()
        self.now += 0.01

    def run(self, bound: int) -> None:
        """Run until all is done. Raise AssertionError if that takes more than `bound` steps."""
        while not (self.core.idle and not self.results):
            self.step()
            bound -= 1
            assert bound >= 0, f"no end: {self.core!r}"

    def check(self) -> None:
        """Check the invariants."""
        if self._checked:
            check(self.core, self.worker)

    def check_finished(self) -> None:
        """Check, when all is done, that each sample has had its end and that nothing is held."""
        state = self.core.snapshot()
        assert all(client.finish_reason is not None for client in self.clients.values()), "every sample ends"
        assert (state.running, state.waiting, state.waiting_tokens, state.in_flight) == (0, 0, 0, 0)
        assert (state.blocks_free, state.tokens_held) == (state.blocks, 0), "all blocks are free at the end"
        for finish in FinishReason:
            ends = sum(client.finish_reason is finish for client in self.clients.values())
            assert getattr(state, f"finished_{finish.value}") == ends

    def _see(self, plan: StepPlan) -> None:
        self.seen["plans"] += 1
        self.seen["forks"] += len(plan.forks)
        self.seen["copies"] += len(plan.block_copies)
        self.seen["two in flight"] += self.core.in_flight == 2
        self.seen["chunks"] += sum(row.count > 1 and not row.samples for row in plan.rows)
        ended = [sequence for sequence in self.core._queues.stopping if sequence.finish_reason is not None]
        self.seen["stray rows"] += len(ended)

    def _receive(self, news: list[ProgressRow]) -> None:
        for row in news:
            self.clients[row.id, row.sample].receive(row, self.core.snapshot().steps)

    def _deadly(self, plan: StepPlan) -> bool:
        assert self.worker is not None
        for row in plan.rows:
            position = self.poison.get(self.worker.slots[row.slot].sampling.seed)
            if position is not None and row.start <= position < row.start + row.count:
                return True
        return False

"""A core, a worker and a clock. Tests drive them by hand or at random, and each call checks every invariant.

Results come late: a plan is executed when it is made, since a device runs plans in order, and its result is held until
`deliver`.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from random import Random
from typing import Any

from core_invariants import check, check_writes
from msgspec.structs import replace
from simulated_worker import AT_ONCE, NO_ADAPTER, ExpectedOutput, SimulatedWorker, StepCosts, expected_output

from services.scheduler.core import Limits, Scheduler, WorkerResources
from services.scheduler.core.policy import may_preempt
from services.scheduler.core.sequence import Sequence, State
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
    Suspicion,
    TokenLogprobs,
    UnloadAdapter,
    pack_tokens,
    unpack_tokens,
)

MAX_DEATHS_ALONE = 4
"""Workers that may die while they run one sequence alone, at different positions, and the last one ends it."""


def sampling_of(sampling: Sampling, sample: int) -> Sampling:
    """Return the sampling of one sample of a request. Only sample 0 scores the prompt."""
    return sampling if sample == 0 else replace(sampling, prompt_logprobs=-1)


class Client:
    """The client of one sample: the output that it has received, and the expected output."""

    def __init__(self, oracle: ExpectedOutput, output: list[int], prompt_len: int) -> None:
        self.oracle = oracle
        self.output = list(output)
        self.scores: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = -1
        self.scheduling: SchedulingInfo | None = None
        self.first_step: int | None = None  # committed steps when its first token came
        self.prompt_len = prompt_len
        self._max_cached = prompt_len if output else prompt_len - 1

    def receive(self, row: ProgressRow, steps: int) -> None:
        """Take a row. Raise AssertionError if it does not continue the stream, or differs from the expected output."""
        assert self.finish_reason is None, "nothing comes after the end"
        assert row.position == len(self.output), "output positions are contiguous"
        if row.tokens and self.first_step is None:
            self.first_step = steps
        if row.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
            assert row.scheduling is not None or self.scheduling is not None, "its first row says how it came to run"
        if row.scheduling is not None:
            assert row.scheduling != self.scheduling, "it is sent when it has changed"
            if self.scheduling is not None:
                assert row.scheduling.queued_seconds == self.scheduling.queued_seconds, (
                    "its first admission does not change"
                )
                assert row.scheduling.preemptions >= self.scheduling.preemptions
            self.scheduling = row.scheduling
        else:
            assert row.tokens or row.prompt_logprobs or row.finish_reason is not None, "a row has something to say"
        self.output += row.tokens
        self.scores += row.prompt_logprobs or []
        expected = self.oracle.tokens[row.position : row.position + len(row.tokens)]
        assert row.tokens == expected, "tokens are those of the undisturbed run"
        assert self.scores == self.oracle.scores[: len(self.scores)], "each score is sent once, in order"
        assert 0 <= row.cached_tokens <= self._max_cached, "at least one token is always computed"
        assert self.cached_tokens in (-1, row.cached_tokens), "usage does not change"
        self.cached_tokens = row.cached_tokens
        self.finish_reason = row.finish_reason
        if row.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (self.output, row.finish_reason) == (self.oracle.tokens, self.oracle.finish_reason), (
                "it ends where it should"
            )
            assert self.scores == self.oracle.scores, "the whole prompt was scored"


class SuspicionCheck:
    """Keeps for each sample what it should be suspected of, by the plans that were made and the deaths of workers.

    Keys are (id of the request, sample).
    """

    def __init__(self) -> None:
        self.expected: defaultdict[tuple[int, int], Suspicion] = defaultdict(Suspicion)
        self.condemned: set[tuple[int, int]] = set()
        self._quarantines_on_arrival = 0

    def submit(self, request: Submit, core: Scheduler) -> None:
        """Note a request, whose first sample may bring a suspicion. Must be called when the core has accepted it."""
        taken = core._queues.requests[request.id].unfinished[request.sample].suspicion
        self.expected[request.id, request.sample] = taken
        may_be_taken = request.resumed and request.suspicion.deaths_alone > 0
        if taken != Suspicion():
            assert may_be_taken, "only one that has killed a worker alone is held back"
            assert taken == request.suspicion, "it brings what it is suspected of"
            self._quarantines_on_arrival += 1
        assert self._quarantines_on_arrival or not may_be_taken, "nothing keeps the first one from being a suspect"

    def lose_worker(self, core: Scheduler) -> None:
        """Note the death of a worker. Must be called before the core hears of it."""
        ranges: dict[Any, list[int]] = {}
        for plan in core._in_flight:
            for row, sequence in zip(plan.rows, plan.sequences, strict=True):
                first = row.start if row.count else 0  # a fork's child has not computed anything alone
                ranges.setdefault(sequence, []).extend((first, row.start + row.count))
        for sequence, positions in ranges.items():
            if sequence.finish_reason is None:
                self._suspect((sequence.request.id, sequence.sample), positions, alone=len(ranges) == 1)

    def commit(self, core: Scheduler) -> None:
        """Note that the result of the oldest plan is back. Must be called before the core hears of it."""
        plan = core._in_flight[0]
        for row, sequence in zip(plan.rows, plan.sequences, strict=True):
            key = (sequence.request.id, sequence.sample)
            if row.start + row.count >= self.expected[key].cleared_at:
                self.expected[key] = Suspicion()

    def receive(self, row: ProgressRow, client: Client) -> None:
        """Check a row that `client` has received."""
        key = (row.id, row.sample)
        known = client.scheduling.suspicion if client.scheduling else Suspicion()
        if client.scheduling is not None:
            assert known == self.expected[key], "rows tell of each change of the suspicion"
        if key in self.condemned:
            assert row.finish_reason is FinishReason.ERROR, "what is proven to kill workers is ended"

    def _suspect(self, key: tuple[int, int], positions: list[int], *, alone: bool) -> None:
        before, start, end = self.expected[key], min(positions), max(positions)
        cleared_at, deaths_alone = max(before.cleared_at, end), before.deaths_alone + alone
        if not alone:
            self.expected[key] = replace(before, cleared_at=cleared_at)
            return
        again = deaths_alone > 1 and set(range(start, end)) & set(range(before.start, before.end))
        if again or deaths_alone >= MAX_DEATHS_ALONE:
            self.condemned.add(key)
        self.expected[key] = Suspicion(cleared_at, deaths_alone, start, end)


class OrderCheck:
    """Checks that a plan keeps to the static order. It must be created before the plan."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._quarantined = core._quarantine.active
        self._waiting = list(core._queues.waiting.items)
        self._first = next(iter(core._queues.running.items), None)
        self._held = [adapter for adapter in core._adapters._slots if adapter is not None and adapter.num_holders]
        self._draining = core._adapters._draining

    def check(self, plan: StepPlan | None) -> None:
        """Raise AssertionError if a sequence was passed by one behind it, or the first preempted for those behind.

        One that lacks its adapter may be passed.
        """
        if self._core._quarantine.active and plan is not None:
            assert set(self._core._in_flight[-1].sequences) <= set(self._core._quarantine.group), (
                "suspects have no company"
            )
        if self._quarantined:
            return
        lacking = [one for one in self._waiting if one.state is State.WAITING and self._lacks_adapter(one)]
        first = self._first
        stay = [one for one in self._waiting if one.state is State.WAITING and one not in lacking]
        if first is not None and first.state is not State.RUNNING:
            preempting = [one for one in self._waiting if may_preempt(self._core.limits, one, first)]
            assert preempting, "the first is no victim"
        if plan is not None and plan.new_sequences and stay:
            slots = {new.slot for new in plan.new_sequences}
            admitted = [one for one in self._core._queues.running.items if one.slot in slots]
            assert max(one.key for one in admitted) < min(one.key for one in stay), "nobody is passed by another"
        if plan is not None and lacking:
            self._check_claim(plan, lacking[0])

    def _lacks_adapter(self, sequence: Sequence) -> bool:
        """Return whether a sequence's adapter was in no slot, or in one that is drained or could be given away."""
        adapter, adapters = sequence.request.adapter, self._core._adapters
        if adapter is None:
            return False
        return adapter not in self._held or adapter is adapters._draining

    def _check_claim(self, plan: StepPlan, first: Sequence) -> None:
        """Check that nobody behind `first`, which lacks its adapter, takes what it waits for."""
        adapters = self._core._adapters
        slots = {new.slot for new in plan.new_sequences}
        admitted = [one for one in self._core._queues.running.items if one.slot in slots]
        before = [one.request.adapter for one in admitted if one.key < first.key]
        behind = [one.request.adapter for one in admitted if one.key > first.key and one.request.adapter is not None]
        assert self._draining not in behind or self._draining is None, "a slot that is drained gets nobody"
        brought = [adapter for adapter in behind if adapter not in (*self._held, *before)]
        assert not brought or adapters._num_held < adapters.max_loras, "one idle slot is kept for the first"


class BudgetCheck:
    """Checks how many positions a plan has for prompts. It must be created before the plan."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        running = core._queues.running.items
        self._streams = {
            one for one in running if one.progress.num_scheduled >= one.prompt_len and one.progress.num_unscheduled == 1
        }
        chunked = sum(one.progress.num_unscheduled > 0 for one in running if one not in self._streams)
        self._in_line = chunked + len(core._queues.waiting)

    def check(self, plan: StepPlan) -> str:
        """Raise AssertionError if the plan has too much or too little for prompts. Return what bounds it."""
        core, limits, in_flight = self._core, self._core.limits, self._core._in_flight[-1]
        rows = list(zip(in_flight.rows, in_flight.sequences, strict=True))
        chunked = sum(row.count for row, sequence in rows if sequence not in self._streams)
        single = sum(row.count for row, sequence in rows if sequence in self._streams)
        if limits.num_stages > 1:
            share = math.ceil(len(self._streams) / min(limits.num_stages, limits.depth))
            new = {new.slot for new in plan.new_sequences}  # one may have been preempted, and is back
            going_on = [row for row, sequence in rows if sequence in self._streams and row.slot not in new]
            assert len(going_on) <= share, "other stages have as many streams"
        done = {sequence for row, sequence in rows if row.samples}
        others = [one for one in core._queues.running.items if one not in done | self._streams]
        left = any(one.progress.num_unscheduled for one in others)
        streaming = single or any(one.state is State.RUNNING for one in self._streams)
        if not (streaming and limits.max_step_seconds):
            assert not left or single + chunked == limits.max_num_batched_tokens, "prompts alone get a whole step"
            return "the size of a step"
        assert not left or chunked >= min(16, limits.max_num_batched_tokens - single), "prompts never stand still"
        predicted = core._step_time.predict(single, chunked)
        least = min(16 * max(self._in_line, 1), 128)
        assert chunked <= least or predicted <= limits.max_step_seconds, "streams do not wait for prompts"
        return "the time of a step" if left else "demand"


class GrammarCheck:
    """Checks how much a plan brings the worker to compile. It must be created before the plan."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._known = {one.sampling.grammar for one in core._queues.running.items} | {""}

    def check(self, plan: StepPlan) -> bool:
        """Raise AssertionError if the plan has too many new grammars. Return whether one has to wait for the next."""
        new = {new.sampling.grammar for new in plan.new_sequences} - self._known
        length = sum(max(len(grammar), 1024) for grammar in new)
        assert len(new) <= 1 or length <= 16_384, "streams wait for few grammars"
        first = self._core._queues.first_waiting(())
        if not new or first is None or first.sampling.grammar in self._known | new:
            return False
        return length + max(len(first.sampling.grammar), 1024) > 16_384


class SimulatedAdapters:
    """The folders of adapters, what the engine should know of them, and the workers' answers that wait."""

    def __init__(self, max_loras: int, max_cpu_loras: int) -> None:
        self.max_loras = max_loras
        self.max_cpu_loras = max_cpu_loras
        self.files: dict[str, int] = {}  # contents by path; a test changes them
        self.answers: deque[tuple[int, int | None]] = deque()  # (number, content); None: there is no such folder
        self.names: dict[int, str] = {}  # of all adapters that were added, by number
        self.contents: dict[int, int | None] = {}  # as they were first loaded
        self.loaded_once: set[int] = set()
        self.named: dict[str, int] = {}  # numbers of those that requests can name
        self.of_requests: dict[int, int] = {}  # numbers by the id of a request
        self.failed: set[tuple[int, int]] = set()  # samples whose adapter failed later


class SimulatedEngine:
    """Keeps the clients' requests and their output, and checks the core after each call.

    `on_rows` gets the rows of each call, after they were checked.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        checked: bool = True,
        on_rows: Callable[[list[ProgressRow]], None] = lambda rows: None,
        costs: StepCosts = AT_ONCE,
        measured: tuple[float, float] = (0.0, 0.0),
        host: tuple[int, float] = (0, 0.0),
        max_loras: int = 0,
        max_cpu_loras: int = 0,
    ) -> None:
        """`costs` are those of the workers' steps; what each has `measured` is of a step and of one more token.

        `host` is the number of host blocks, and the measured seconds to copy one. Workers have `max_loras` adapter
        slots, and host memory for `max_cpu_loras` adapters.
        """
        self.core = Scheduler(limits)
        self.limits = limits
        self.clients: dict[tuple[int, int], Client] = {}
        self.results: deque[StepResult] = deque()
        self.stale: list[StepResult] = []
        self.plans: list[StepPlan] = []  # of the epoch
        self.now = 1000.0
        self.poison: dict[int, int] = {}  # seed: position at which computing it kills the worker
        self.salts: dict[int, str] = {}  # by seed
        self.adapters = SimulatedAdapters(max_loras, max_cpu_loras)
        self._forgotten_steps = 0  # steps of the epoch before the last reset of the prefix cache
        self.suspicions = SuspicionCheck()
        self.costs = costs
        self._measured = measured
        self._host = host
        self._checked = checked
        self._on_rows = on_rows
        self.losses = 0
        self.events: Counter[str] = Counter()  # how often each event happened, to show that workloads reach it
        self._ids = 0
        self._epochs = 0
        self.worker: SimulatedWorker | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin an epoch with a new worker."""
        self._epochs += 1
        limits, epoch = self.limits, Epoch("boot", self._epochs)
        sizes = (*self._host, self.adapters.max_loras, self.adapters.max_cpu_loras)
        self.core.begin_epoch(epoch, limits.num_blocks, WorkerResources(*self._measured, *sizes))
        self.worker = SimulatedWorker(
            Configure(
                epoch,
                limits.block_size,
                limits.num_blocks,
                limits.max_num_seqs,
                limits.max_model_len,
                limits.max_num_batched_tokens,
                self._host[0],
            ),
            self.salts,
            self.costs,
            self.adapters.max_loras,
            self.adapters.max_cpu_loras,
            limits.num_stages,
        )
        self._forgotten_steps = 0
        self.plans = []
        self.check()

    def lose_worker(self) -> None:
        """Let the worker die, and lose the results that are not delivered."""
        self.stale += self.results
        self.results.clear()
        self.worker = None
        self.adapters.answers.clear()
        self.losses += 1
        self.suspicions.lose_worker(self.core)
        rows = self.core.lose_worker(self.now)
        self._receive(rows)
        failed = {(row.id, row.sample) for row in rows if row.finish_reason is not None}
        assert bool(failed) == bool(self.suspicions.condemned & failed), "nobody else is condemned"
        assert all(self.clients[key].finish_reason is not None for key in self.suspicions.condemned)
        assert self.core.plan(self.now) is None, "no plan without a worker"
        self.check()

    def end_epoch(self) -> None:
        """Let the worker end between two steps, once all its results are delivered."""
        while self.results:
            self.deliver()
        self.worker = None
        self.adapters.answers.clear()
        self.core.end_epoch()
        self.events["epochs that ended in order"] += 1
        assert self.core.snapshot().running == 0, "all wait for the next one"
        assert self.core.plan(self.now) is None, "no plan without a worker"
        self.check()

    def add_adapter(self, name: str, path: str, *, replaces: bool = False) -> int | str:
        """Have an adapter loaded from a path, which must be one of `adapters.files` to be found. Return as the core."""
        added = self.core.add_adapter(name, path, replaces=replaces)
        if isinstance(added, int):
            assert added not in self.adapters.names, "a number is never used again"
            self.adapters.names[added] = name
        self.check()
        return added

    def remove_adapter(self, name: str) -> str:
        """Let no request name an adapter from now on."""
        error = self.core.remove_adapter(name)
        assert (name in self.adapters.named) == (not error)
        self.adapters.named.pop(name, None)
        self.check()
        return error

    def deliver_load(self) -> None:
        """Give the worker's oldest answer about an adapter to the core."""
        number, content = self.adapters.answers.popleft()
        before = self.adapters.contents.setdefault(number, content)
        users = {(id, sample) for (id, sample) in self.clients if self.adapters.of_requests.get(id) == number}
        unfinished = {key for key in users if self.clients[key].finish_reason is None}
        name = self.adapters.names[number]
        if content is None:
            rows = self.core.adapter_refused(number, "there is no such folder")
        else:
            rows = self.core.adapter_loaded(number, f"digest of {content}")
        self._receive(rows)
        if content is None or content != before:
            assert {(row.id, row.sample) for row in rows} == unfinished, "its requests end, and no others"
            assert all(row.finish_reason is FinishReason.ERROR and repr(name) in row.detail for row in rows)
            self.adapters.failed |= users
            self.events["adapters that failed later"] += bool(unfinished)
            if self.adapters.named.get(name) == number:
                del self.adapters.named[name]
        else:
            assert not rows
            if number not in self.adapters.loaded_once:
                self.adapters.loaded_once.add(number)
                self.adapters.named[name] = number
            else:
                self.events["adapters loaded again"] += 1
        self.check()

    def reset_prefix_cache(self) -> None:
        """Have the core forget all cached blocks. From now on, nothing that is computed already may be found."""
        self.core.reset_prefix_cache()
        state, queues = self.core.snapshot(), self.core._queues
        assert (state.blocks_cached, state.host_blocks_cached) == (0, 0)
        for one in [*queues.running.items, *queues.stopping, *queues.waiting.items]:
            computed = one.progress.num_computed or one.table.num_in_host
            assert not computed or one.table.publish_at > self.limits.max_model_len, "what is computed stays private"
        self._forgotten_steps = self.worker.num_steps if self.worker is not None else 0
        self.events["resets"] += 1
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
        salt: str = "",
        adapter: str = "",
        grammar: str = "",
    ) -> Refused | int:
        """Submit a request. Return the refusal, or its id."""
        self._ids += 1
        sampling = Sampling(
            max_tokens=max_tokens,
            seed=self._ids if seed is None else seed,
            stop_token_ids=stops,
            min_tokens=min_tokens,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )
        tokens, came = pack_tokens(prompt + output), arrival or self.now
        request = Submit(
            self._ids,
            tokens,
            len(prompt),
            sampling,
            n,
            sample,
            priority,
            came,
            samples_before,
            cache_salt=salt,
            adapter=adapter,
        )
        return self.submit_request(request) or self._ids

    def submit_request(self, request: Submit) -> Refused | None:
        """Submit a request as it comes from a gateway. Return the refusal, if it is refused."""
        refused = self.core.submit(request, self.now)
        if refused is not None:
            assert refused.id == request.id
            return refused
        self.suspicions.submit(request, self.core)
        self.salts[request.sampling.seed] = request.cache_salt
        content = NO_ADAPTER
        if request.adapter:
            self.adapters.of_requests[request.id] = number = self.adapters.named[request.adapter]
            content = self.adapters.contents[number] or NO_ADAPTER
        tokens, prompt_len = unpack_tokens(request.tokens).tolist(), request.prompt_len
        for index in range(request.sample, request.sample + request.n):
            sampling = sampling_of(request.sampling, index)
            oracle = expected_output(tokens, prompt_len, sampling, index, request.cache_salt, content)
            self.clients[request.id, index] = Client(oracle, tokens[prompt_len:], prompt_len)
        self.check()
        return None

    def accept(self, prompt: list[int], max_tokens: int, **options: Any) -> int:
        """Submit a request that must not be refused. Return its id."""
        id = self.submit(prompt, max_tokens, **options)
        assert isinstance(id, int), id
        return id

    def abort(self, id: int, sample: int = -1) -> None:
        """Abort a request, or one sample of it, and check that it has ended."""
        self._receive(self.core.abort(id, sample))
        for (other, index), client in self.clients.items():
            assert other != id or sample not in (-1, index) or client.finish_reason is not None
        self.check()

    def plan(self) -> StepPlan | None:
        """Make a plan and execute it. The worker may die of it."""
        order, budget, grammars = OrderCheck(self.core), BudgetCheck(self.core), GrammarCheck(self.core)
        swapped = [one for one in self.core._queues.waiting.items if one.table.host_blocks]
        written = self.core._block_manager.host_tier._written
        leaving = [one for one in swapped if any(block in written for block in one.table.host_blocks)]
        plan = self.core.plan(self.now)
        assert all(one.state is State.WAITING for one in leaving), "a sequence that is being swapped waits"
        if self._checked:
            order.check(plan)
        self._send_adapter_messages()
        if plan is None:
            waits = self.core.in_flight or self.worker is None or self.adapters.answers
            assert self.core.idle or waits, "it never stands still"
            return None
        assert self.worker is not None
        if self._checked:
            check_writes(self.core)
            self.events[f"bounded by {budget.check(plan)}"] += 1
            self.events["grammars that wait for another plan"] += grammars.check(plan)
        self.plans.append(plan)
        self._count_events(plan)
        self.results.append(self.worker.execute(plan))
        self._check_admitted(plan, swapped)
        self.check()
        if self._kills_worker(plan):
            self.lose_worker()
        return plan

    def deliver(self) -> list[ProgressRow]:
        """Give the oldest result back to the core."""
        self.stale.append(self.results.popleft())
        assert self.worker is not None
        self.worker.land()
        self.suspicions.commit(self.core)
        rows = self.core.commit(self.stale[-1])
        self._receive(rows)
        self.check()
        return rows

    def deliver_stale(self, rng: Random) -> None:
        """Check that a result changes nothing if it is of another epoch, was delivered before, or is early."""
        wrong = [*self.stale[-3:], *list(self.results)[1:]]
        if self.results:
            wrong += [result for result in self.stale if result.step == self.results[0].step]
        if not wrong:
            return
        result = rng.choice(wrong)
        before = self.core.snapshot()
        assert self.core.commit(result) == []
        assert self.core.snapshot() == before

    def step(self) -> None:
        """Plan until no more steps may be in flight, then deliver one result."""
        while self.plan() is not None:
            pass
        if self.worker is None:
            self.begin_epoch()
        elif self.results:
            self.deliver()
        if self.adapters.answers:
            self.deliver_load()
        self.now += 0.01

    def run(self, bound: int) -> None:
        """Run until every request has ended. Raise AssertionError if that takes more than `bound` steps."""
        while not (self.core.idle and not self.results):
            self.step()
            bound -= 1
            assert bound >= 0, f"no end: {self.core!r}"

    def check(self) -> None:
        """Check the invariants, after the worker has got what it has to be told about adapters."""
        self._send_adapter_messages()
        if self._checked:
            check(self.core, self.worker)

    def check_finished(self) -> None:
        """Check that each sample has ended and nothing is held. Must be called after every request has ended."""
        state = self.core.snapshot()
        assert all(client.finish_reason is not None for client in self.clients.values()), "every sample ends"
        assert (state.running, state.waiting, state.waiting_tokens, state.in_flight) == (0, 0, 0, 0)
        assert (state.adapters_running, state.adapters_waiting) == ([], [])
        assert (state.blocks_free, state.tokens_held) == (state.blocks, 0), "all blocks are free at the end"
        assert (state.swapped, state.host_blocks_free) == (0, state.host_blocks), "all host blocks are free at the end"
        assert state.worker_losses == self.losses, "an epoch that ends in order is no loss"
        for finish_reason in FinishReason:
            ends = sum(client.finish_reason is finish_reason for client in self.clients.values())
            assert getattr(state, f"finished_{finish_reason.value}") == ends

    def _send_adapter_messages(self) -> None:
        for message in self.core.take_adapter_messages():
            assert self.worker is not None
            if isinstance(message, UnloadAdapter):
                self.worker.unload_adapter(message.adapter)
                continue
            content = self.adapters.files.get(message.path)
            if content is not None:
                self.worker.load_adapter(message.adapter, content)
            self.adapters.answers.append((message.adapter, content))

    def _check_admitted(self, plan: StepPlan, swapped: list[Sequence]) -> None:
        """Check that the sequences that enter slots find nothing that was to be forgotten.

        Those that were `swapped` before the plan go on with what they had computed, as those do that kept running.
        """
        assert self.worker is not None
        resumed = {one.slot for one in swapped if one.state is State.RUNNING}
        self.events["resumed from host memory"] += len(resumed)
        admitted = {new.slot: new for new in plan.new_sequences if new.slot not in resumed}
        for row in plan.rows:
            if row.slot in admitted and row.start:
                assert self.worker.oldest_step(row) > self._forgotten_steps, "nothing from before the reset is found"
                self.events["hits of a salt"] += self.salts[admitted[row.slot].sampling.seed] != ""

    def _count_events(self, plan: StepPlan) -> None:
        self.events["plans"] += 1
        self.events["forks"] += len(plan.forks)
        self.events["adapters put into slots"] += len(plan.adapter_slots)
        self.events["copies"] += len(plan.block_copies)
        self.events["swaps in both directions"] += bool(plan.swap_out and plan.swap_in)
        self.events["blocks saved and reused by one plan"] += bool(
            {block for block, _ in plan.swap_out} & {block for _, block in plan.swap_in}
        )
        self.events["two in flight"] += self.core.in_flight == 2
        self.events["more in flight"] += self.core.in_flight > 2
        self.events["sampled tokens that are told"] += len(plan.sampled)
        self.events["chunks"] += sum(row.count > 1 and not row.samples for row in plan.rows)
        ended = [sequence for sequence in self.core._queues.stopping if sequence.finish_reason is not None]
        self.events["stray rows"] += len(ended)

    def _receive(self, rows: list[ProgressRow]) -> None:
        for row in rows:
            client = self.clients[row.id, row.sample]
            client.receive(row, self.core.snapshot().steps)
            self.suspicions.receive(row, client)
        self._on_rows(rows)

    def _kills_worker(self, plan: StepPlan) -> bool:
        assert self.worker is not None
        for row in plan.rows:
            position = self.poison.get(self.worker.slots[row.slot].sampling.seed)
            if position is not None and row.start <= position < row.start + row.count:
                return True
        return False

"""Random workloads. One seed determines everything, so a failing workload can be run again by its number."""

from random import Random

from msgspec.structs import replace
from simulated_engine import SimulatedEngine
from simulated_worker import VOCABULARY, StepCosts

from services.scheduler.core import Limits
from shared.protocol import FinishReason, Refused


def run(seed: int, *, deep: bool = True) -> SimulatedEngine:
    """Run one workload from beginning to end. Raise AssertionError if an invariant is broken.

    `deep`: some workloads have more than two plans in flight, or a pipeline.
    """
    rng = Random(seed)
    adapter_rng = Random(f"adapters of {seed}")
    limits = random_limits(rng)
    if deep:
        limits = _with_random_depth(limits, Random(f"depth of {seed}"))
    engine = _engine(limits, Random(f"time of {seed}"), adapter_rng)
    script = _Script(rng, engine, Random(f"cache of {seed}"), adapter_rng, Random(f"grammars of {seed}"))
    for _ in range(rng.randint(4, 40)):
        script.move()
    script.finish()
    engine.check_finished()
    script.check_outcome()
    return engine


def random_limits(rng: Random) -> Limits:
    """Return limits under which any request of at most `max_model_len` tokens fits."""
    size = rng.choice([1, 2, 3, 4, 4, 8])
    seqs = rng.randint(1, 6)
    longest = rng.randint(12, 48)
    blocks = -(-longest // size) + rng.choice([0, 0, 1, 2, 5, 20, 60])
    policy = rng.choice(["fcfs", "fcfs", "priority"])
    return Limits(
        block_size=size,
        num_blocks=blocks,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + rng.choice([1, 2, 5, 16, 64]),
        max_model_len=longest,
        prefix_caching=rng.random() < 0.9,
        depth=rng.choice([1, 2, 2]),
        policy=policy,  # type: ignore[arg-type]
        priority_ageing=rng.choice([0.0, 0.05]) if policy == "priority" else 0.0,
        max_queued_requests=rng.choice([4, 1000]),
    )


def _with_random_depth(limits: Limits, rng: Random) -> Limits:
    """Return the limits of each third workload as they are, and others with another depth, with a pipeline or not.

    It has an `rng` of its own, so that the rest of a workload stays as it is.
    """
    if rng.random() < 0.33:
        return limits
    return replace(limits, depth=rng.randint(1, 5), num_stages=rng.choice([1, 2, 2, 3, 4]))


def _engine(limits: Limits, rng: Random, adapter_rng: Random) -> SimulatedEngine:
    """Return an engine whose steps take time, if `rng` says so, of which the workers have measured one thing or other.

    It has an `rng` of its own, and another for adapters, so that the rest of a workload stays as it is.
    """
    max_loras = adapter_rng.choice([0, 0, 0, 1, 2, 3])
    costs = StepCosts(rng.uniform(0.001, 0.02), rng.uniform(1e-4, 1e-2), rng.uniform(2e-4, 3e-3), 1e-5)
    wrong = rng.choice([0.0, 0.2, 1.0, 1.0, 5.0])
    max_step_seconds = rng.choice([0.0, 0.02, 0.05])
    mode = rng.choice(["auto", "swap", "swap", "recompute"])
    host_blocks = rng.choice([0, 2, limits.num_blocks // 2, limits.num_blocks, 2 * limits.num_blocks])
    return SimulatedEngine(
        replace(limits, max_step_seconds=max_step_seconds, preemption_mode=mode),
        costs=costs,
        measured=(costs.step * wrong, costs.token * wrong),
        host=(host_blocks, rng.choice([0.0, 1e-4, 1e-3])),
        max_loras=max_loras,
        max_cpu_loras=max_loras and max_loras + adapter_rng.choice([0, 0, 1, 3]),
    )


class _Script:
    """The random calls of a workload, and the conditions that its outcome must meet."""

    def __init__(
        self, rng: Random, engine: SimulatedEngine, cache_rng: Random, adapter_rng: Random, grammar_rng: Random
    ) -> None:
        """`cache_rng` decides about salts and resets of the prefix cache, so that the rest stays as it is.

        So do `adapter_rng` about adapters, and `grammar_rng` about grammars.
        """
        self.rng = rng
        self.adapter_rng = adapter_rng
        self.flood = bool(engine.adapters.max_loras) and adapter_rng.random() < 0.2
        self.names = [str(name) for name in range(adapter_rng.randint(1, 6))] if engine.adapters.max_loras else []
        self.cache_rng = cache_rng
        self.salts = cache_rng.choice([[""], [""], ["", "1", "2"]])
        self.grammar_rng = grammar_rng
        self.grammars = ["", "", "1", "2", "3" * 6000, "4" * 9000, "5" * 15_500, "6" * 20_000]
        self.resets = cache_rng.choice([0.0, 0.0, 0.05, 0.3])  # the share of calls before which there is one
        self.engine = engine
        self.prefixes = [self._tokens(rng.randint(1, 24)) for _ in range(2)]
        self.losses = 0
        self.aborts = rng.random() < 0.5
        self.deaths = rng.random() < 0.25
        self.poisonous = rng.random() < 0.1
        self.work = 0  # positions to compute if nothing is shared or computed twice
        self.poisoned: set[int] = set()
        for name in self.names[:3]:
            self._change_adapters(name)

    def move(self) -> None:
        """Make one random call."""
        rng, engine = self.rng, self.engine
        engine.now += rng.choice([0.0, 0.001, 0.01])
        if self.cache_rng.random() < self.resets:
            engine.reset_prefix_cache()
        if self.names:
            if self.adapter_rng.random() < 0.25:
                self._change_adapters(self.adapter_rng.choice(self.names))
            if engine.adapters.answers and self.adapter_rng.random() < 0.3:
                engine.deliver_load()
        roll = rng.random()
        if roll < 0.3:
            self._submit()
        elif roll < 0.36 and self.aborts and engine.clients:
            id, sample = rng.choice(list(engine.clients))
            engine.abort(id, rng.choice([-1, sample]))
        elif roll < 0.39 and self.deaths and engine.worker is not None and not self.poisonous:
            self.losses += 1
            engine.lose_worker()
        elif roll < 0.41 and self.deaths and engine.worker is not None:
            engine.end_epoch()
        elif roll < 0.45:
            engine.deliver_stale(rng)
        elif engine.worker is None:
            engine.begin_epoch()
        elif engine.results and roll < 0.7:
            engine.deliver()
        else:
            engine.plan()

    def finish(self) -> None:
        """Run to the end within a bound on steps."""
        engine = self.engine
        if engine.worker is None:
            engine.begin_epoch()
        drains = self.rng.random() < 0.2
        if self.flood:
            self._flood()
        if drains:
            engine.core.drain()
        # each step moves the first in order on by a position at min_tokens, and a preempted one is computed again
        engine.run(100 + 8 * self.work * (1 + len(self.poisoned)))

    def _flood(self) -> None:
        """Let requests of all adapters come without end, until those that were there before have ended.

        Adapters that were added before are loaded meanwhile.
        """
        engine = self.engine
        before = [key for key, client in engine.clients.items() if client.finish_reason is None]
        bound = 100 + 8 * self.work * (1 + len(self.poisoned))
        while any(engine.clients[key].finish_reason is None for key in before) or engine.core._adapters._added:
            if engine.core.snapshot().waiting < 2 * engine.limits.max_num_seqs:
                self._submit_late()
            engine.step()
            bound -= 1
            assert bound >= 0, f"those that come later starve it: {engine.core!r}"
        engine.events["floods"] += bool(before)

    def _submit_late(self) -> None:
        """Submit a request that is behind all others in the order."""
        engine, prompt = self.engine, self.prefixes[0][:4]
        priority = 3 if engine.limits.policy == "priority" else 0
        adapter = self.adapter_rng.choice(["", *engine.adapters.named])
        max_tokens = min(self.adapter_rng.randint(1, 6), engine.limits.max_model_len - len(prompt))
        outcome = engine.submit(prompt, max_tokens, priority=priority, arrival=engine.now + 1e6, adapter=adapter)
        if not isinstance(outcome, Refused):
            self.work += len(prompt) + max_tokens + 1

    def _change_adapters(self, name: str) -> None:
        """Add, replace or remove an adapter, or let its files change, go or come back."""
        rng, engine = self.adapter_rng, self.engine
        files, path = engine.adapters.files, f"/{name}/{rng.randint(0, 1)}"
        roll = rng.random()
        if roll < 0.6:
            files.setdefault(path, rng.randint(1, 1000))
            engine.add_adapter(name, path, replaces=rng.random() < 0.7)
        elif roll < 0.65:
            engine.remove_adapter(name)
        elif roll < 0.84:
            files[path] = rng.randint(1, 1000)
        else:
            files.pop(path, None)

    def check_outcome(self) -> None:
        """Check the conditions on the workload as a whole."""
        caching = self.engine.limits.prefix_caching  # a hit spares computing the deadly position
        for (id, _), client in self.engine.clients.items():
            if client.finish_reason is FinishReason.ERROR:  # killed twice while alone, by itself or by chance
                failed = any(id == other for other, _ in self.engine.adapters.failed)
                assert id in self.poisoned or self.losses > 1 or failed, "an innocent request was condemned"
            elif (
                id in self.poisoned and client.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and not caching
            ):
                assert len(client.oracle.tokens) + client.prompt_len - 1 <= self.engine.poison[id], (
                    "it went past its death"
                )
        state = self.engine.core.snapshot()
        assert state.prefix_hits <= state.prefix_queries
        assert state.prompt_tokens <= sum(client.prompt_len for client in self.engine.clients.values())

    def _submit(self) -> None:
        rng, engine, longest = self.rng, self.engine, self.engine.limits.max_model_len
        prompt = rng.choice(self.prefixes)[: rng.choice([4, 8, 12, 24])]
        prompt = (prompt + self._tokens(rng.choice([0, 0, 1, 3, 8])))[:longest]
        max_tokens = min(rng.choice([0, 1, 2, 5, 9, 20]), longest - len(prompt))
        stops = self._tokens(1) if rng.random() < 0.3 else []
        min_tokens = rng.randint(0, max_tokens) if rng.random() < 0.2 else 0
        scores = rng.choice([-1, -1, -1, -1, 0])
        seed = engine._ids + 1
        output = self._output(prompt, max_tokens, stops, min_tokens, seed)
        n = 1 if output else rng.choice([1, 1, 1, 2, 3, 5])
        priority = rng.randint(-2, 2) if engine.limits.policy == "priority" else 0
        poisonous = self.poisonous and rng.random() < 0.3 and len(prompt) > 1
        if poisonous:
            engine.poison[seed] = rng.randint(1, len(prompt) + max_tokens)
            self.poisoned.add(seed)
        adapter = self.adapter_rng.choice(["", *self.names])
        outcome = engine.submit(
            prompt,
            max_tokens,
            output=output,
            n=n,
            sample=rng.choice([0, 0, 3]),
            priority=priority,
            arrival=engine.now - rng.choice([0.0, 0.0, 0.02, 5.0]),
            samples_before=rng.choice([0, 0, 0, 1, 7]),
            stops=stops,
            min_tokens=min_tokens,
            prompt_logprobs=scores,
            salt=self.cache_rng.choice(self.salts),
            adapter=adapter,
            grammar=self.grammar_rng.choice(self.grammars),
        )
        if isinstance(outcome, Refused):
            assert not output or (adapter and adapter not in engine.adapters.named)
        else:
            self.work += n * (len(prompt) + max_tokens + 1)

    def _output(self, prompt: list[int], max_tokens: int, stops: list[int], min_tokens: int, seed: int) -> list[int]:
        """Return output that the request comes with, like one that is resubmitted after a scheduler's death."""
        rng = self.rng
        if rng.random() > 0.15 or max_tokens < 2:
            return []
        output = [rng.choice([token for token in range(VOCABULARY) if token not in stops]) for _ in range(max_tokens)]
        return output[: rng.randint(1, max_tokens - 1)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]
